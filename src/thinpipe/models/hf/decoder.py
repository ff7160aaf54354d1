"""Any decoder-only model of Hugging Face as segments of a pipeline; implements `models/protocol.py`.

A segment runs transformers' own forward of a model that has only the segment's blocks (`models/hf/hollow.py`). The
state of the segment before is put in at the input of the first own block, and taken at the output of the last one: not
as `inputs_embeds`, which some models scale or add positions to.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinpipe.config.huggingface_model import HuggingFaceModelConfig, LoraConfig
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.model_family import MAX_LOGITS
from thinpipe.core.errors import UserError
from thinpipe.core.seeds import derive_seed
from thinpipe.models.hf.base_tensors import stored_tensors
from thinpipe.models.hf.blocks import OwnBlock, Pass
from thinpipe.models.hf.counter_dropout import CounterDropout
from thinpipe.models.hf.hollow import build_on_meta, load_hollow
from thinpipe.models.hf.layer_plan import LayerPlan, find_plan, leaf
from thinpipe.models.hf.pretrained_config import dropout_rates, transformers_config
from thinpipe.subspace import DenseSpace
from thinpipe.subspace.space import OnGradient


class HuggingFaceSegment(nn.Module):
    """Consecutive blocks of a Hugging Face model; the first segment also has its embeddings, the last one norm and
    head. On the meta device until `materialise`.

    A head that is tied to the embeddings is a copy of them if the model has several segments: two parameters, which are
    trained separately.
    """

    def __init__(self, config: HuggingFaceModelConfig, index: int, whole: Any, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.index, self.plan = config, index, plan
        self.space = DenseSpace(config.dim)
        self.on_gradient: OnGradient | None = None
        self.execution, self.autocast_bf16 = ExecutionConfig(), False
        self.drops = bool(dropout_rates(config.stored)) or bool(config.lora and config.lora.lora_dropout)
        """Whether blocks or embeddings have dropout in training."""
        self.base_hashes: dict[str, str] = {}
        """By stored name, the hash of each tensor of the base that `materialise` has read."""
        self._running = Pass()
        self._hollow: Any = None
        self._own(whole)

    first: nn.ModuleDict | None
    last: nn.ModuleDict | None

    @property
    def own_blocks(self) -> range:
        return self.config.segments[self.index]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.config.segments) - 1

    def _own(self, model: Any) -> None:
        """Makes this segment's layers of `model` its modules, in layer order."""
        plan, blocks = self.plan, model.get_submodule(self.plan.blocks)

        def end(paths: tuple[str, ...]) -> nn.ModuleDict:
            return nn.ModuleDict({leaf(path): model.get_submodule(path) for path in paths})

        self.first = end(plan.first) if self.is_first else None
        self.blocks = nn.ModuleDict({str(index): blocks[index] for index in self.own_blocks})
        self.last = end(plan.last) if self.is_last else None

    def huggingface_name(self, name: str) -> str:
        """Hugging Face's name of one of this segment's parameters."""
        return self.plan.huggingface_name(name)

    def materialise(self, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Self:
        """Reads this segment's weights from the model's folder: no other tensor is read, and no file without one of its
        own is opened. `seed`: of the adapters' first values. Raises UserError."""
        hollow = load_hollow(
            transformers_config(self.config.stored),
            self.own_blocks,
            stored_tensors(self.config.source, self.base_hashes),
            self._running,
            device=torch.device(device),
            dtype=dtype,
            quantize=self.config.quantize_base,
        )
        if self.config.is_untied and self.is_first and self.is_last:
            _untie(hollow)
        if self.config.lora is not None:
            self._adapt(hollow, self.config.lora, seed)
        self._own(hollow)
        object.__setattr__(self, "_hollow", hollow)  # not registered: the layers are, under this segment's names
        blocks = hollow.get_submodule(self.plan.blocks)
        for index in self.own_blocks:
            is_first = index == self.own_blocks.start
            blocks[index] = OwnBlock(blocks[index], self._running, index, is_first=is_first)
        return self.train(self.training)

    def release(self) -> None:
        """Frees the weights. The segment cannot be used after that."""
        self.first, self.blocks, self.last = None, nn.ModuleDict(), None
        object.__setattr__(self, "_hollow", None)

    def _adapt(self, hollow: Any, lora: LoraConfig, seed: int) -> None:
        from thinpipe.models.hf.lora import add_adapters, draw_adapters  # peft takes seconds to import

        add_adapters(hollow, self.plan, lora)
        draw_adapters({name: p for name, p in hollow.named_parameters() if p.requires_grad}, seed)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self._hollow is not None:
            self._hollow.train(mode)
        return self

    def forward(
        self,
        ids_BT: Tensor,
        state: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
        targets_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """State for the next segment; from the last segment logits or, with `targets_BT`, the cross-entropy of every
        token in one row, without all logits at once.

        `ids_BT`: only their shape matters after the first segment, where a pipeline has no token ids
        (`segments_need_ids`). A model whose later blocks read them so differs from the whole one, which the probe sees.
        `position_ids_BT`: positions that begin again at 0 with each of several texts packed into one row.
        """
        if self._hollow is None:
            raise ValueError("the segment has no memory yet: call materialise first")
        if not self.is_first:
            ids_BT = torch.zeros_like(ids_BT)
        device, mode = ids_BT.device.type, self.execution.checkpoint_activations
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast_bf16, cache_enabled=mode == "none"):
            if mode == "segment" and torch.is_grad_enabled():
                arguments = (ids_BT, state, dropout_seed, position_ids_BT)
                states = _checkpointed(self._run_blocks, *arguments)
            else:
                states = self._run_blocks(ids_BT, state, dropout_seed, position_ids_BT)
            if not self.is_last:
                return states
            return self._logits(ids_BT, states) if targets_BT is None else self._losses(ids_BT, states, targets_BT)

    def _run_blocks(
        self, ids_BT: Tensor, state: Tensor | None, dropout_seed: int | None, position_ids_BT: Tensor | None
    ) -> Tensor:
        """The state after the last own block; in the last segment after the final norm."""
        if (state is None) != self.is_first:
            raise ValueError("the first segment starts from token ids alone, every other from a state")
        running = self._running
        running.state, running.output = state, None
        running.dropout_seed = dropout_seed if self.drops and self.training else None
        running.checkpoints_blocks = self.execution.checkpoint_activations == "block"
        positions = {} if position_ids_BT is None else {"position_ids": position_ids_BT}
        with self._dropout(dropout_seed):
            output = self._hollow.base_model(input_ids=ids_BT, use_cache=False, **positions)
        running.output_class = type(output)
        states: Tensor = output.last_hidden_state if self.is_last else running.output_state
        running.state = running.output = None
        return states

    def _dropout(self, seed: int | None) -> AbstractContextManager[Any]:
        """Of the embeddings; blocks have seeds of their own."""
        if not (self.drops and self.training):
            return nullcontext()
        if seed is None:
            raise ValueError("dropout is on: pass dropout_seed, or call model.eval() first")
        return CounterDropout(derive_seed(seed, "embedding"))

    @property
    def whole(self) -> Any:
        """transformers' model, of a segment that is the whole model and has its weights."""
        assert self.is_first
        assert self.is_last
        return self._hollow

    def _logits(self, ids_BT: Tensor, states_BTD: Tensor) -> Tensor:
        """transformers' own head, with its scales and softcaps."""
        known = _KnownStates(states_BTD, self._running.output_class)
        name, whole = self._hollow.base_model_prefix, self._hollow.base_model
        setattr(self._hollow, name, known)
        try:
            logits: Tensor = self._hollow(input_ids=ids_BT, use_cache=False).logits
        finally:
            setattr(self._hollow, name, whole)
        return logits

    def _losses(self, ids_BT: Tensor, states_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """In chunks of the tokens, whose logits are computed again in the backward pass, if there are many."""

        def losses(ids_BT: Tensor, states_BTD: Tensor, targets_BT: Tensor) -> Tensor:
            logits_NV = self._logits(ids_BT, states_BTD).flatten(0, 1)
            wide = torch.promote_types(logits_NV.dtype, torch.float32)
            return F.cross_entropy(logits_NV.to(wide), targets_BT.flatten(), reduction="none")

        rows = max(1, MAX_LOGITS // self.config.vocab_size)
        if targets_BT.numel() <= rows:
            return losses(ids_BT, states_BTD, targets_BT)
        flat = (tensor.flatten(0, 1)[None] for tensor in (ids_BT, states_BTD, targets_BT))
        chunks = zip(*(tensor.split(rows, dim=1) for tensor in flat), strict=True)
        return torch.cat([_checkpointed(losses, *chunk) for chunk in chunks])


class _KnownStates(nn.Module):
    """In place of the decoder, for a head that is to be computed from known states."""

    def __init__(self, states_BTD: Tensor, kind: type[Any]) -> None:
        super().__init__()
        self.states_BTD, self.kind = states_BTD, kind

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.kind(last_hidden_state=self.states_BTD)


class HuggingFaceModel(nn.Module):
    """All segments of a Hugging Face model, on the meta device until each is materialised."""

    def __init__(self, config: HuggingFaceModelConfig) -> None:
        super().__init__()
        self.config, self.space = config, DenseSpace(config.dim)
        whole = build_on_meta(transformers_config(config.stored), torch.float32)
        plan = find_plan(whole)
        if config.is_untied:
            _untie(whole)
        self.adapter_config = None
        """What peft has made of `config.lora`; None without adapters."""
        if config.lora is not None:
            from thinpipe.models.hf.lora import add_adapters

            self.adapter_config = add_adapters(whole, plan, config.lora)
        self.segments = tuple(HuggingFaceSegment(config, index, whole, plan) for index in range(len(config.segments)))
        self._registered = nn.ModuleList(self.segments)

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Any:
        for segment in self.segments:
            yield from segment.named_parameters()

    def forward(self, ids_BT: Tensor, *, targets_BT: Tensor | None = None) -> Tensor:
        """Logits or, with `targets_BT`, the cross-entropy of every token in one row."""
        state: Tensor | None = None
        for segment in self.segments:
            state = segment(ids_BT, state, targets_BT=targets_BT)
        assert state is not None
        return state

    def set_execution(self, execution: ExecutionConfig, *, autocast_bf16: bool = False) -> None:
        """Sets the execution options of all segments. Raises UserError for what is not supported."""
        if execution.compile:
            raise UserError("execution.compile is not for Hugging Face models: leave it out")
        for segment in self.segments:
            segment.execution, segment.autocast_bf16 = execution, autocast_bf16


def _untie(whole: Any) -> None:
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head is not None and table is not None and head.weight is table.weight:
        head.weight = copy.deepcopy(head.weight)


def _checkpointed(run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    out: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out
