"""Allocates and initialises the weights of a model or of a single segment built on the meta device.

An initial weight depends only on the seed and on the parameter's seed name, which includes its layer
(`models/seed_names.py`): not on the device, the dtype, the number of segments or the order of initialisation.
"""

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from thinpipe.config.model import ModelConfig
from thinpipe.core.seeds import derive_seed
from thinpipe.models.boundary_projection import OrthonormalProjection
from thinpipe.models.seed_names import seed_name
from thinpipe.subspace import ResidualWriter
from thinpipe.subspace.basis import orthonormalise
from thinpipe.subspace.factorized_embedding import NarrowEmbedding, UpProjection
from thinpipe.subspace.normal import fill_normal
from thinpipe.subspace.parameter_tags import copy_mark

if TYPE_CHECKING:
    from thinpipe.models.model import Model, Segment

ModelPart = TypeVar("ModelPart", "Model", "Segment")


@runtime_checkable
class Fillable(Protocol):
    """A module whose buffers are computed from its settings by `fill`, after they have been allocated."""

    def fill(self) -> None: ...


def materialise(
    part: ModelPart,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    draw: bool = True,
) -> ModelPart:
    """Allocates parameters and buffers in place and returns the same object.

    With `draw=False` the parameters stay uninitialised, for callers that load a checkpoint next.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one object
    for module_name, module in part.named_modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in replaced:
                new = nn.Parameter(torch.empty(old.shape, device=device, dtype=dtype), old.requires_grad)
                copy_mark(old, new)
                if draw:
                    # All orthonormal projections start equal, so that the up projection after a boundary matches the
                    # down projection before it.
                    place = "projector" if isinstance(module, OrthonormalProjection) else module_name
                    init_parameter(new.data, module, name, part.config, derive_seed(seed, seed_name(f"{place}.{name}")))
                replaced[old] = new
            setattr(module, name, replaced[old])
        empty = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name, buffer in empty:
            # Buffers (basis, tables) keep float32 beside bfloat16 weights, but become float64 beside float64 weights.
            wider = buffer.is_floating_point() and dtype == torch.float64
            setattr(module, name, torch.empty(buffer.shape, device=device, dtype=dtype if wider else buffer.dtype))
        if empty and isinstance(module, Fillable):  # not if already allocated: a shared basis may have been updated
            module.fill()
    return part


@torch.no_grad()
def init_parameter(target: Tensor, owner: nn.Module, name: str, config: ModelConfig, seed: int) -> None:
    """Normal weights (residual writers scaled by 1 / sqrt(2 n_layers), as in GPT-2), zero biases, unit norm weights."""
    if name == "bias":
        target.zero_()
    elif isinstance(owner, nn.Linear | nn.Embedding):
        std = config.init_std / (2 * config.n_layers) ** 0.5 if isinstance(owner, ResidualWriter) else config.init_std
        fill_normal(target, _factorized_embedding_std(owner, config) or std, seed)
    elif isinstance(owner, OrthonormalProjection):
        fill_normal(target, 1.0, seed)
        target.copy_(orthonormalise(target))
    else:
        target.fill_(1.0)


def _factorized_embedding_std(owner: nn.Module, config: ModelConfig) -> float | None:
    match owner:
        case NarrowEmbedding():
            return 1.0
        case UpProjection():
            return float(config.init_std / owner.rank**0.5)
        case _:
            return None
