"""Converts a dense model to a subspace model: the inverse of `to_dense`, lossy unless the subspace is all of R^D.

The basis U retains most of the squared norm of the residual writers in the subspace: the top eigenvectors of Σ W Wᵀ,
D x D in float64, where a bias counts as one more column of W. Embeddings are kept exactly: T U becomes coordinates and
the rest the frozen table. Uses no data and no training; `ToSubspaceReport` says how much was lost. float64 is on the
CPU, whatever device the models are on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinpipe.config.model import SubspaceConfig
from thinpipe.core.errors import UserError
from thinpipe.models.init_weights import materialise
from thinpipe.models.model import Model, build
from thinpipe.models.to_dense import row_chunks
from thinpipe.subspace import Basis, Subspace, coordinates_of


@dataclass(frozen=True, kw_only=True)
class ToSubspaceReport:
    """Fractions of squared norm retained by the conversion, ‖UᵀW‖² / ‖W‖²; 1 for a writer of zero weights."""

    width: int
    retained: float
    """Fraction over all residual writers in the subspace together; the basis maximises it."""
    retained_by_writer: dict[str, float]
    """Fraction by writer, such as blocks.0.mlp.down_proj. Writers outside the subspace are copied and not listed."""


@torch.no_grad()
def to_subspace(dense: Model, subspace: SubspaceConfig, boundaries: tuple[int, ...]) -> tuple[Model, ToSubspaceReport]:
    """The subspace model, with its own weights, and a report of the loss. A tied head becomes a copy of the embedding.

    Raises TypeError if `dense` is a subspace model, UserError if `subspace` has no width or its table is not "given".
    """
    if isinstance(dense.space, Subspace):
        raise TypeError(
            "this is a subspace model already: to change its width or its boundaries, convert it with to_dense first"
        )
    if subspace.width is None or subspace.fixed != "given":
        raise UserError('the embedding gives the frozen table: set subspace.fixed = "given", and subspace.width')
    config = replace(dense.config, tied=False, boundaries=boundaries, subspace=subspace)
    sources = dict(dense.named_parameters(remove_duplicate=False))  # a tied head is listed under its own name too
    example = next(iter(sources.values()))
    model = materialise(build(config), seed=0, device=example.device, dtype=example.dtype, draw=False)
    assert isinstance(model.space, Subspace)
    writers = _subspace_writers(model, sources)
    basis_DK = _best_basis([part for parts in writers.values() for part in parts], subspace.width)
    model.space.basis = Basis(basis_DK.to(model.space.basis_DK.dtype))
    for name, target in model.named_parameters():
        coordinates = coordinates_of(target)
        if coordinates is None:
            target.copy_(sources[name])
        elif coordinates.axis == 0:
            target.copy_((basis_DK.T @ sources[name].cpu().double()).to(target.dtype))
        else:
            _split_embedding(sources[name], target, model.space, config.spec.frozen_tables[name])
    return model.train(dense.training), _report(writers, basis_DK)


def _subspace_writers(model: Model, sources: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Dense weight, and bias if there is one, of every residual writer that is in the subspace in `model`."""
    writers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        coordinates = coordinates_of(parameter)
        if coordinates is not None and coordinates.axis == 0:
            writers.setdefault(name.rpartition(".")[0], []).append(sources[name])
    return writers


def _best_basis(written: list[Tensor], width: int) -> Tensor:
    """The basis U of this width that retains most of Σ ‖W‖², in float64, directions in descending order."""
    gram_DD = torch.zeros(written[0].shape[0], written[0].shape[0], dtype=torch.float64)
    for part in written:
        columns_DN = part.cpu().double().view(part.shape[0], -1)  # a bias is one column
        gram_DD.addmm_(columns_DN, columns_DN.T)
    basis_DK: Tensor = torch.linalg.eigh(gram_DD).eigenvectors[:, -width:].flip(1).contiguous()
    return basis_DK


def _report(writers: dict[str, list[Tensor]], basis_DK: Tensor) -> ToSubspaceReport:
    whole = {name: sum(_squared_norm(part) for part in parts) for name, parts in writers.items()}
    inside = {
        name: sum(_squared_norm(basis_DK.T @ part.cpu().double()) for part in parts) for name, parts in writers.items()
    }
    return ToSubspaceReport(
        width=basis_DK.shape[1],
        retained=_share(sum(inside.values()), sum(whole.values())),
        retained_by_writer={name: _share(inside[name], whole[name]) for name in writers},
    )


def _squared_norm(tensor: Tensor) -> float:
    return float(tensor.cpu().double().square().sum())


def _share(inside: float, whole: float) -> float:
    return inside / whole if whole else 1.0


def _split_embedding(table_VD: Tensor, coordinates_VK: Tensor, space: Subspace, frozen: str) -> None:
    """Splits an embedding T into coordinates C = T U and the frozen table T − C Uᵀ (attribute `frozen` of `space`)."""
    basis_DK, frozen_VD = space.basis_DK.cpu().double(), getattr(space, frozen).content()
    for _, frozen_rows, table_rows, coordinates in row_chunks(frozen_VD, table_VD, coordinates_VK):
        source = table_rows.cpu().double()
        rounded = (source @ basis_DK).to(coordinates.dtype)
        coordinates.copy_(rounded)
        # Uses the rounded C and U, so that the frozen table absorbs their rounding errors.
        frozen_rows.copy_((source - rounded.double() @ basis_DK.T).to(frozen_VD.dtype))
