"""Gives memory and first values to a model or to one segment of it, and to nothing else.

A weight depends on the seed and on its own name, which includes its layer (`models/seed_names.py`): not on the device,
the dtype, the number of segments, or on what else was materialised before it.
"""

from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from thinpipe.core.seeds import derive_seed
from thinpipe.models.config import ModelConfig
from thinpipe.models.model import Model, Segment
from thinpipe.models.neck import Projector
from thinpipe.models.seed_names import seed_name
from thinpipe.subspace import Writer
from thinpipe.subspace.coordinates import copy_mark
from thinpipe.subspace.normal import fill_normal
from thinpipe.subspace.stiefel import orthonormalise
from thinpipe.subspace.table import NarrowRows, Widening

Part = TypeVar("Part", Model, Segment)


@runtime_checkable
class Fillable(Protocol):
    """A module whose buffers follow from its settings."""

    def fill(self) -> None: ...


def materialise(
    part: Part, *, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, draw: bool = True
) -> Part:
    """Allocates parameters and buffers in place and returns the same object.

    With `draw=False` the parameters hold whatever the memory held: for callers who load a checkpoint next.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one object
    for module_name, module in part.named_modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in replaced:
                new = nn.Parameter(torch.empty(old.shape, device=device, dtype=dtype), old.requires_grad)
                copy_mark(old, new)
                if draw:
                    # Projectors begin alike, so that what one writes the next one reads.
                    place = "projector" if isinstance(module, Projector) else module_name
                    draw_initial(new.data, module, name, part.config, derive_seed(seed, seed_name(f"{place}.{name}")))
                replaced[old] = new
            setattr(module, name, replaced[old])
        empty = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name, buffer in empty:
            # A basis or a table is more exact than bfloat16 weights, but not less exact than float64 ones.
            wider = buffer.is_floating_point() and dtype == torch.float64
            setattr(module, name, torch.empty(buffer.shape, device=device, dtype=dtype if wider else buffer.dtype))
        if empty and isinstance(module, Fillable):  # a basis that another segment shares may have moved on
            module.fill()
    return part


@torch.no_grad()
def draw_initial(target: Tensor, owner: nn.Module, name: str, config: ModelConfig, seed: int) -> None:
    """Normal weights (writers smaller by sqrt(2 n_layers), as in GPT-2), zero biases, unit norms."""
    if name == "bias":
        target.zero_()
    elif isinstance(owner, nn.Linear | nn.Embedding):
        std = config.init_std / (2 * config.n_layers) ** 0.5 if isinstance(owner, Writer) else config.init_std
        fill_normal(target, _std_in_table(owner, config) or std, seed)
    elif isinstance(owner, Projector):
        fill_normal(target, 1.0, seed)
        target.copy_(orthonormalise(target))
    else:
        target.fill_(1.0)


def _std_in_table(owner: nn.Module, config: ModelConfig) -> float | None:
    match owner:
        case NarrowRows():
            return 1.0
        case Widening():
            return float(config.init_std / owner.rank**0.5)
        case _:
            return None
