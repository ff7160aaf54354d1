"""Converts a subspace model to a dense model with the same logits: W = U Z, T = T_fixed + C Uᵀ.

For export, and for tools that support only dense models. The dense model has its own weights, no boundaries and an
untied head; training it would not keep it in the subspace.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from thinpipe.config.model import SubspaceConfig
from thinpipe.core.errors import UserError
from thinpipe.models.init_weights import materialise
from thinpipe.models.model import Model, build
from thinpipe.subspace import FixedTable, Subspace, coordinates_of

_CHUNK = 1 << 22
"""Maximum number of entries converted to float64 at once, to avoid a second copy of a large table."""


@torch.no_grad()
def to_dense(model: Model) -> Model:
    """The equivalent dense model in the model's dtype and on its device, computed in float64 on the CPU and rounded
    once. A dense model is returned unchanged. Raises UserError for a model with a boundary projection.

    Equivalent without dropout only: GPT-2's embedding dropout acts on the coordinates in the subspace model, and on the
    whole embedding in the dense model.
    """
    if model.config.has_projection:
        raise UserError(
            "a model with a boundary projection cannot be converted to a plain one of its family, which this needs: "
            "use a run without "
            "model.projection, or `thinpipe export`, which writes the code that such a model needs beside its weights"
        )
    if not isinstance(model.space, Subspace):
        return model
    config = replace(model.config, boundaries=(), subspace=SubspaceConfig())
    factored = dict(model.named_parameters())
    example = next(iter(factored.values()))
    dense = materialise(build(config), seed=0, device=example.device, dtype=example.dtype, draw=False)
    basis_DK = model.space.basis_DK.cpu().double()
    for name, target in dense.named_parameters():
        coordinates = coordinates_of(factored[name])
        if coordinates is None:
            target.copy_(factored[name])
        elif coordinates.axis == 0:
            _expand_writer(factored[name].cpu().double(), basis_DK, target)
        else:
            _expand_embedding(factored[name], basis_DK, getattr(model.space, config.spec.frozen_tables[name]), target)
    return dense.train(model.training)


def _expand_writer(written: Tensor, basis_DK: Tensor, target: Tensor) -> None:
    """Writes U Z to `target`, for a weight Z (K x inputs) or a bias Z (K)."""
    for _, target_rows, basis_rows in row_chunks(target, basis_DK):
        target_rows.copy_((basis_rows @ written).to(target.dtype))


def _expand_embedding(coordinates_VK: Tensor, basis_DK: Tensor, frozen: FixedTable, target_VD: Tensor) -> None:
    buffers = {name: buffer.cpu() for name, buffer in frozen.named_buffers()}
    for rows, target_rows, coordinates in row_chunks(target_VD, coordinates_VK):
        fixed = functional_call(frozen, buffers, (rows, torch.float64))
        target_rows.copy_((fixed + coordinates.cpu().double() @ basis_DK.T).to(target_VD.dtype))


def row_chunks(*tables: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Row indices, on the CPU, and views of these rows of every table, in chunks of at most `_CHUNK` entries of the
    first table (at least one row)."""
    n_rows = max(1, _CHUNK // tables[0][0].numel())
    indices = torch.arange(tables[0].shape[0])
    yield from zip(indices.split(n_rows), *(table.split(n_rows) for table in tables), strict=True)
