"""A small model of the structure of a given one, whole and in segments, and comparisons of the two for the probe.

Every comparison raises UnsupportedModelError, with the first thing that differs under its name in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.model import CheckpointActivations, ExecutionConfig
from thinpipe.core.seeds import derive_seed
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.hollow import causal_model_class, quiet
from thinpipe.models.hf.layer_plan import LayerPlan, UnsupportedModelError, find_plan
from thinpipe.models.hf.pretrained_config import describe, dropout_rates, transformers_config
from thinpipe.models.hf.shrink import TOKENS, shrink

SEGMENTS, ROWS, LENGTH, FIRST_TEXT = 4, 2, 40, 18
"""Segments of the small model, rows and tokens of its batch, and tokens of the first of two texts in a row."""
_SHARD_NBYTES = 100_000
_NOISE = 0.05
_LEAK = 1e-4
"""Largest difference of logits, relative to the largest logit, that is rounding: a packed row has other matrix shapes
than a text alone, and so other sums."""


@dataclass(frozen=True)
class Trial:
    """A small model in both forms."""

    stored: Mapping[str, Any]
    """config.json of the model that is probed."""
    small: dict[str, Any]
    """config.json of the small model, without dropout."""
    whole: Any
    plan: LayerPlan
    model: HuggingFaceModel

    @classmethod
    def of(cls, stored: Mapping[str, Any], folder: Path) -> "Trial":
        """Draws the small model's weights, writes them into the folder, and has the segments read them."""
        shrunk = shrink(stored)
        small = {**shrunk, **dict.fromkeys(dropout_rates(shrunk), 0.0)}
        whole = _draw(small)
        plan = find_plan(whole)
        whole.should_save_on_this_rank = lambda _is_main_process: True  # else it saves in the first process alone
        with quiet():
            whole.save_pretrained(folder, max_shard_size=_SHARD_NBYTES)
        return cls(stored, small, whole, plan, _in_segments(small, folder, SEGMENTS))

    def describe(self) -> str:
        planned = "transformers' own plan" if self.whole.config.base_model_pp_plan else "thinpipe's own plan"
        last = ", ".join(self.plan.last)
        return f"{', '.join(self.plan.first)} | {self.plan.blocks} | {last} ({planned})"

    @property
    def folder(self) -> Path:
        return Path(self.model.config.source)

    @cached_property
    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("probe", "ids"))
        lowest = len(TOKENS)
        return torch.randint(lowest, self.whole.config.vocab_size, (ROWS, LENGTH + 1), generator=generator)

    def compare_states(self) -> None:
        """States at boundaries, logits and losses."""
        states: dict[int, Tensor] = {}
        hooks = [
            self.whole.get_submodule(self.plan.blocks)[boundary - 1].register_forward_hook(
                lambda _module, _inputs, output, at=boundary: states.__setitem__(
                    at, output[0] if isinstance(output, tuple) else output
                )
            )
            for boundary in self.model.config.boundaries
        ]
        with torch.no_grad():
            wanted = self.whole.train()(input_ids=self.ids[:, :-1], use_cache=False).logits
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            outputs = run(self.model, self.ids[:, :-1])
        for boundary, output in zip(self.model.config.boundaries, outputs, strict=False):
            place = f"the state after {self.plan.blocks}.{boundary - 1}"
            require_equal(place, output, states[boundary])
        require_equal("the logits", outputs[-1], wanted)

    def compare_gradients(self) -> int:
        """Number of gradients compared: those of all parameters, tied ones once."""
        found = self._by_huggingface_name(self.model, backward(self.model, self.ids))
        self.whole.zero_grad(set_to_none=True)
        logits = self.whole.train()(input_ids=self.ids[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), self.ids[:, 1:].flatten(), reduction="none").mean().backward()
        wanted = dict(self.whole.named_parameters())
        for name, parameter in wanted.items():
            if name not in found:
                raise UnsupportedModelError(f"no segment has {name}")
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            require_equal(f"the gradient of {name}", found[name], gradient)
        return len(wanted)

    def _by_huggingface_name(self, model: HuggingFaceModel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients in segments under transformers' names; those of tied parameters are added up."""
        names = {id(parameter): name for name, parameter in self.whole.named_parameters()}
        every = dict(self.whole.named_parameters(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for own_name, gradient in gradients.items():
            name = names[id(every[model.segments[0].huggingface_name(own_name)])]
            found[name] = found[name] + gradient if name in found else gradient
        return found

    def compare_recomputation(self, mode: CheckpointActivations) -> None:
        """Gradients with activation checkpointing against those without."""
        wanted = backward(self.model, self.ids)
        self.model.set_execution(ExecutionConfig(checkpoint_activations=mode))
        try:
            _require_equal_gradients(backward(self.model, self.ids), wanted)
        finally:
            self.model.set_execution(ExecutionConfig())

    def compare_packing(self) -> str:
        """Two texts in a row against the second text alone, and segments against the whole model."""
        ids_BT = self.ids[:, :-1]
        positions_T = torch.cat([torch.arange(FIRST_TEXT), torch.arange(LENGTH - FIRST_TEXT)])
        positions_BT = positions_T.expand_as(ids_BT)
        with torch.no_grad():
            self.whole.train()
            alone = self.whole(input_ids=ids_BT[:, FIRST_TEXT:], use_cache=False).logits
            packed = self.whole(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).logits
            outputs = run(self.model, ids_BT, position_ids_BT=positions_BT)
        require_equal("the logits of packed texts", outputs[-1], packed)
        difference = ((packed[:, FIRST_TEXT:] - alone).abs().max() / alone.abs().max()).item()
        if not difference < _LEAK:
            raise UnsupportedModelError(
                f"a text sees the one before it in its row (its logits change by {difference:.1%} of the largest): "
                "one text in a row"
            )
        return f"texts of a row do not see each other (position_ids; rounding {difference:.0e})"

    def compare_dropout(self) -> None:
        """One segment against several, with the small model's own rates and other numbers drawn in between."""
        with_rates = shrink(self.stored)
        logits, gradients = [], []
        for count in (1, SEGMENTS):
            model = _in_segments(with_rates, self.folder, count)
            torch.manual_seed(count)
            gradients.append(self._by_huggingface_name(model, backward(model, self.ids, dropout_seed=1)))
            logits.append(run(model, self.ids[:, :-1], dropout_seed=1)[-1])
        require_equal("the logits with dropout", logits[1], logits[0])
        _require_equal_gradients(gradients[1], gradients[0])
        with torch.no_grad():
            if torch.equal(run(self.model, self.ids[:, :-1])[-1], logits[0]):
                raise UnsupportedModelError("dropout has no effect in its segments")


def _draw(small: Mapping[str, Any]) -> Any:
    """The small model with random weights everywhere: no zero bias and no unit norm hides a mistake."""
    config = transformers_config(small)
    generator = torch.Generator().manual_seed(derive_seed("probe", "weights"))
    with quiet():
        torch.manual_seed(derive_seed("probe", "initial"))
        whole = causal_model_class(config)._from_config(config, dtype=torch.float32)
    kept = {*whole.state_dict()}
    with torch.no_grad():
        for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
            if name in kept and tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * _NOISE)
    return whole


def _in_segments(small: Mapping[str, Any], folder: Path, count: int) -> HuggingFaceModel:
    config = describe(small, str(folder))
    edges = sorted({round(config.n_layers * index / count) for index in range(1, count)} - {0, config.n_layers})
    return materialised(replace(config, boundaries=tuple(edges)))


def materialised(config: HuggingFaceModelConfig) -> HuggingFaceModel:
    """The model with all its segments, in training mode."""
    model = HuggingFaceModel(config)
    for segment in model.segments:
        segment.materialise(seed=0)
    return model.train()


def run(model: HuggingFaceModel, ids_BT: Tensor, **options: Any) -> list[Tensor]:
    """Outputs of all segments: states, and at last logits or losses."""
    outputs: list[Tensor] = []
    for index, segment in enumerate(model.segments):
        seeds = {"dropout_seed": options["dropout_seed"]} if "dropout_seed" in options else {}
        others = {name: value for name, value in options.items() if name != "dropout_seed"}
        outputs.append(segment(ids_BT, outputs[index - 1] if index else None, **seeds, **others))
    return outputs


def backward(model: HuggingFaceModel, ids_BW: Tensor, **options: Any) -> dict[str, Tensor]:
    """Gradients of the mean loss by the segments' own names; each segment has a backward pass of its own, as in
    different processes."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs: list[Tensor | None] = [None]
    outputs: list[Tensor] = []
    for segment in model.segments:
        out = segment(ids_BW[:, :-1], inputs[-1], targets_BT=ids_BW[:, 1:], **options)
        outputs.append(out)
        inputs.append(out.detach().requires_grad_())
    outputs[-1].mean().backward()
    for output, received in zip(reversed(outputs[:-1]), reversed(inputs[1:-1]), strict=True):
        assert received is not None
        output.backward(received.grad)
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def _require_equal_gradients(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        require_equal(f"the gradient of {name}", found[name], gradient)


def require_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise UnsupportedModelError(f"{what} is {tuple(found.shape)}, in the whole model {tuple(wanted.shape)}")
    if not torch.equal(found, wanted):
        difference = (found - wanted).abs().max().item()
        raise UnsupportedModelError(f"{what} differs from the whole model's, by up to {difference:.1e}")
