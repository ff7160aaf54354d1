"""A dense model confined to a subspace: the other way round from folding, and not exact below full width.

The basis is the one that keeps most of what the confined writers can write: the top eigenvectors of Σ W Wᵀ, D x D in
float64, where a bias counts as one more column of W. Embeddings are kept whatever the width: T U becomes coordinates
and the rest the frozen table. No data is looked at and nothing is trained; the report says how much was lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.models.config import SubspaceConfig
from thinpipe.models.fold import FROZEN_PART, row_chunks
from thinpipe.models.initial import materialise
from thinpipe.models.model import Model, build
from thinpipe.subspace import Basis, Subspace, coordinates_of


@dataclass(frozen=True, kw_only=True)
class CastReport:
    """Shares of squared norms ‖UᵀW‖² / ‖W‖²; a writer of zeros has lost nothing."""

    width: int
    kept: float
    """Of all confined writers together: what the basis makes as large as it can be."""
    kept_by_writer: dict[str, float]
    """By name, such as blocks.0.mlp.down_proj. Free writers are copied and not listed."""


@torch.no_grad()
def cast(dense: Model, subspace: SubspaceConfig, boundaries: tuple[int, ...]) -> tuple[Model, CastReport]:
    """A subspace model with weights of its own, and what it kept. A tied head becomes a copy of the embedding."""
    if isinstance(dense.space, Subspace):
        raise TypeError("this is a subspace model already: to change its width or its boundaries, fold it first")
    if subspace.width is None or subspace.fixed != "given":
        raise UserError('the embedding gives the frozen table: set subspace.fixed = "given", and subspace.width')
    config = replace(dense.config, tied=False, boundaries=boundaries, subspace=subspace)
    sources = dict(dense.named_parameters(remove_duplicate=False))  # a tied head by its own name as well
    example = next(iter(sources.values()))
    model = materialise(build(config), seed=0, device=example.device, dtype=example.dtype, draw=False)
    assert isinstance(model.space, Subspace)
    writers = _confined_writers(model, sources)
    basis_DK = _best_basis([part for parts in writers.values() for part in parts], subspace.width)
    model.space.basis = Basis(basis_DK)
    for name, target in model.named_parameters():
        coordinates = coordinates_of(target)
        if coordinates is None:
            target.copy_(sources[name])
        elif coordinates.axis == 0:
            target.copy_(basis_DK.T @ sources[name].double())
        else:
            _split_embedding(sources[name], target, model.space, FROZEN_PART[name])
    return model.train(dense.training), _report(writers, basis_DK)


def _confined_writers(model: Model, sources: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The dense weight, and bias if there is one, of every writer that `model` confines."""
    writers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        coordinates = coordinates_of(parameter)
        if coordinates is not None and coordinates.axis == 0:
            writers.setdefault(name.rpartition(".")[0], []).append(sources[name])
    return writers


def _best_basis(written: list[Tensor], width: int) -> Tensor:
    """U in float64, its largest direction first: no other basis of this width keeps more of Σ ‖W‖²."""
    gram_DD = torch.zeros(written[0].shape[0], written[0].shape[0], dtype=torch.float64, device=written[0].device)
    for part in written:
        columns_DN = part.double().view(part.shape[0], -1)  # a bias is one column
        gram_DD.addmm_(columns_DN, columns_DN.T)
    basis_DK: Tensor = torch.linalg.eigh(gram_DD).eigenvectors[:, -width:].flip(1).contiguous()
    return basis_DK


def _report(writers: dict[str, list[Tensor]], basis_DK: Tensor) -> CastReport:
    whole = {name: sum(_squared_norm(part) for part in parts) for name, parts in writers.items()}
    inside = {name: sum(_squared_norm(basis_DK.T @ part.double()) for part in parts) for name, parts in writers.items()}
    return CastReport(
        width=basis_DK.shape[1],
        kept=_share(sum(inside.values()), sum(whole.values())),
        kept_by_writer={name: _share(inside[name], whole[name]) for name in writers},
    )


def _squared_norm(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _share(inside: float, whole: float) -> float:
    return inside / whole if whole else 1.0


def _split_embedding(table_VD: Tensor, coordinates_VK: Tensor, space: Subspace, frozen: str) -> None:
    """C = T U, and T − C Uᵀ for the frozen table of this name."""
    basis_DK, table = space.basis_DK.double(), getattr(space, frozen).content()
    for rows, frozen_rows in row_chunks(table):
        source = table_VD[rows].double()
        coordinates_VK[rows] = (source @ basis_DK).to(coordinates_VK.dtype)
        # From C and U as they are kept: the frozen table makes good what rounding took from them.
        frozen_rows.copy_(source - coordinates_VK[rows].double() @ basis_DK.T)
