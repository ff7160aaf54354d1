"""A subspace model multiplied out into a dense one that computes the same logits: W = U Z, T = T_fixed + C Uᵀ.

For export and for tools that know only dense models. The dense model has weights of its own, no boundaries and an
untied head; it is as large as a dense model, and training it would not keep it in the subspace.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.models.config import SubspaceConfig
from thinpipe.models.initial import materialise
from thinpipe.models.model import Model, build
from thinpipe.subspace import FixedTable, Subspace, coordinates_of

FROZEN_PART = {
    "first.embed_tokens.weight": "tokens",
    "first.wte.weight": "tokens",
    "first.wpe.weight": "positions",
}
"""The frozen table of the space that each embedding is added to."""

_CHUNK = 1 << 22
"""Entries that are in float64 at once: no second copy of a large table."""


@torch.no_grad()
def fold(model: Model) -> Model:
    """The dense twin, in the dtype of the model; computed in float64 and rounded once. A dense model is returned as is.

    Dropout in training is not the same: GPT-2's first one acts on the coordinates alone before, on everything after.
    """
    if model.config.has_neck:
        raise UserError(
            "a model with a neck does not fold into a plain one of its family, which this needs: use a run without "
            "model.neck, or `thinpipe export`, which writes the code that such a model needs beside its weights"
        )
    if not isinstance(model.space, Subspace):
        return model
    config = replace(model.config, boundaries=(), subspace=SubspaceConfig())
    confined = dict(model.named_parameters())
    example = next(iter(confined.values()))
    dense = materialise(build(config), seed=0, device=example.device, dtype=example.dtype, draw=False)
    basis_DK = model.space.basis_DK.double()
    for name, target in dense.named_parameters():
        coordinates = coordinates_of(confined[name])
        if coordinates is None:
            target.copy_(confined[name])
        elif coordinates.axis == 0:
            _expand_writer(confined[name].double(), basis_DK, target)
        else:
            _expand_embedding(confined[name], basis_DK, getattr(model.space, FROZEN_PART[name]), target)
    return dense.train(model.training)


def _expand_writer(written: Tensor, basis_DK: Tensor, target: Tensor) -> None:
    """U Z of a weight (K x inputs) or a bias (K)."""
    for rows, target_rows in row_chunks(target):
        target_rows.copy_(basis_DK[rows] @ written)


def _expand_embedding(coordinates_VK: Tensor, basis_DK: Tensor, frozen: FixedTable, target_VD: Tensor) -> None:
    for rows, target_rows in row_chunks(target_VD):
        target_rows.copy_(frozen(rows, torch.float64) + coordinates_VK[rows].double() @ basis_DK.T)


def row_chunks(target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and views of these rows, few enough at a time to be held in float64."""
    n_rows = max(1, _CHUNK // target[0].numel())
    yield from zip(torch.arange(target.shape[0], device=target.device).split(n_rows), target.split(n_rows), strict=True)
