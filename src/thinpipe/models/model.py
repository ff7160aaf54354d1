"""A model is (first, blocks, last) and a space; a segment is what lies between two boundaries.

Every segment opens its own stream from the token ids and the state it is sent, exactly as it would in a process of
its own. `build` makes a model without memory (on the meta device); `materialise` fills as much of it as is needed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from thinpipe.core.seeds import derive_seed
from thinpipe.models.config import Execution, GPT2Config, LlamaConfig, ModelConfig
from thinpipe.models.gpt2 import gpt2_parts
from thinpipe.models.llama import llama_parts
from thinpipe.models.memory import Memory
from thinpipe.models.neck import Neck
from thinpipe.subspace import FIXED_TABLES, Basis, DenseSpace, FixedTable, FreeSpace, Stream, Subspace, rebase
from thinpipe.subspace.space import OnGradient

FAMILIES: dict[type[ModelConfig], Callable[..., tuple[nn.Module, list[nn.Module], nn.Module]]] = {
    LlamaConfig: llama_parts,
    GPT2Config: gpt2_parts,
}


class Segment(nn.Module):
    """Consecutive blocks, with `first` before them or `last` after them at the ends of the model.

    Parameter names are those of the whole model (`blocks.7.mlp.up_proj.weight`), wherever the segment lives.
    """

    def __init__(
        self,
        config: ModelConfig,
        space: DenseSpace | Subspace,
        *,
        first: nn.Module | None,
        blocks: dict[int, nn.Module],
        last: nn.Module | None,
        neck: Neck | None = None,
    ) -> None:
        super().__init__()
        self.config, self.space = config, space
        by_name = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.first, self.blocks, self.last = first, by_name, last  # in layer order, as in the whole model
        self.necks = nn.ModuleDict({} if neck is None else {str(neck.segment): neck})
        self.execution = Execution()
        self.on_gradient: OnGradient | None = None
        """Called with the D-wide gradient at the input of this segment."""

    def forward(self, ids_BT: Tensor, state: Tensor | None = None, memory: Memory | None = None) -> Tensor:
        """Token ids and, but for the first segment, the state from the one before; state or logits come out.

        With a memory, the ids follow those that it has seen.
        """
        start = self._first_position(ids_BT.shape[1], memory)
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.execution.autocast_bf16):
            if self.first is not None:
                state = self.first(ids_BT, start)
            elif state is None:
                raise ValueError("only the first segment starts from token ids alone")
            neck, base_BTD = self.neck, None
            if neck is None:
                stream = self.space.open(ids_BT, state, self.on_gradient, start)
            else:
                before_BP = None if memory is None else memory.before(neck.segment, ids_BT, neck.reach)
                stream, base_BTD = neck.open(ids_BT, state, before_BP)
            for index, block in self.blocks.items():
                if memory is not None:
                    stream = block(stream, memory.layer(int(index)))
                elif self.execution.checkpoint_activations:
                    stream = _checkpointed(block, stream)
                else:
                    stream = block(stream)
            if self.last is not None:
                out: Tensor = self.last(stream)
            else:
                out = stream.state if neck is None else neck.close(stream, base_BTD)
        return out

    @property
    def neck(self) -> Neck | None:
        neck = next(iter(self.necks.values()), None)
        assert neck is None or isinstance(neck, Neck)
        return neck

    def _first_position(self, tokens: int, memory: Memory | None) -> int:
        """Where these tokens begin. Asks this segment's own first block: other segments may be ahead in one memory."""
        start = 0 if memory is None else memory.layer(int(next(iter(self.blocks)))).length
        end = start + tokens
        if end > self.config.max_seq_len:
            raise ValueError(f"{end} tokens do not fit into max_seq_len {self.config.max_seq_len}")
        if memory is not None and end > memory.max_length:
            raise ValueError(
                f"{end} tokens do not fit into a memory of {memory.max_length}: "
                f"make one of up to max_seq_len {self.config.max_seq_len}"
            )
        return start


def _checkpointed(block: nn.Module, stream: Stream) -> Stream:
    """Keeps the stream and computes the block again when its gradient is needed.

    torch looks for a tensor among the arguments to learn whose random state dropout needs, and does not look into a
    stream: hence the state beside it.
    """
    out: Stream = checkpoint(lambda _state, stream: block(stream), stream.state, stream, use_reentrant=False)
    return out


class Model(nn.Module):
    """All layers of a model. `segments` share its modules: what happens to one happens to the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.space = make_space(config)
        free = FreeSpace(self.space) if isinstance(self.space, Subspace) else self.space
        spaces = [self.space if index < config.first_free_block else free for index in range(config.n_layers)]
        first, blocks, last = FAMILIES[type(config)](config, self.space, spaces)
        # Registered in layer order, which is the order of parameters() and so of every sum over them.
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        has_necks = config.has_neck
        self.necks = nn.ModuleList([Neck(config, index) for index in range(len(config.segments))] if has_necks else [])
        self.segments = tuple(
            Segment(
                config,
                spaces[indices.start],
                first=self.first if indices.start == 0 else None,
                blocks={index: self.blocks[index] for index in indices},
                last=self.last if indices.stop == config.n_layers else None,
                neck=self.necks[index] if has_necks else None,  # type: ignore[arg-type]
            )
            for index, indices in enumerate(config.segments)
        )

    def forward(self, ids_BT: Tensor, memory: Memory | None = None) -> Tensor:
        """Logits of every token; with a memory, the ids follow those that it has seen."""
        state: Tensor | None = None
        for segment in self.segments:
            state = segment(ids_BT, state, memory)
        assert state is not None
        return state

    def execute(self, execution: Execution) -> None:
        """Sets how all segments run."""
        for segment in self.segments:
            segment.execution = execution
        if execution.compile:
            for block in self.blocks:
                block.compile()

    def change_basis(self, old: Basis, new: Basis, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Maps every coordinate to the new basis; returns ‖Z'‖/‖Z‖. Give it to `GrassmannTracker.update`."""
        if not isinstance(self.space, Subspace):
            raise TypeError("a dense model has no basis to change")
        kept_norm = rebase(dict(self.named_parameters()), optimizer, old, new)
        self.space.basis = new
        return kept_norm


def build(config: ModelConfig) -> Model:
    """The model on the meta device: shapes and names, no memory."""
    with torch.device("meta"), _SkipInit():
        return Model(config)


class _SkipInit(TorchFunctionMode):
    """Skips torch's own initialisation of layers: on the meta device it only costs the import of torch's compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in (kwargs or {}) else args[0]
        return function(*args, **(kwargs or {}))


def make_space(config: ModelConfig) -> DenseSpace | Subspace:
    subspace = config.subspace
    if subspace.width is None:
        return DenseSpace(config.dim, config.neck.first_rank)

    def table(rows: int, word: str) -> FixedTable:
        seed = derive_seed(subspace.seed, word)
        return FIXED_TABLES[subspace.fixed](rows, config.dim, std=subspace.fixed_std, seed=seed)

    options: dict[str, Any] = {"tokens": table(config.vocab_size, "tokens")}
    if config.has_position_table:
        options["positions"] = table(config.max_seq_len, "positions")
    return Subspace(config.dim, subspace.width, seed=subspace.seed, **options)
