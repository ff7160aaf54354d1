"""Grassmann updates of the basis U: steps that capture more of the gradient of the residual stream.

Let G be the D-wide gradients at the input of the last segment and S = Σ GᵀG. The gradient energy outside span(U) is
‖G − G U Uᵀ‖² = tr S − tr(UᵀSU); its Riemannian gradient on the Grassmann manifold is (I − UUᵀ)(−2 S U). U is constant
between two updates, so S U = Σ Gᵀ(G U), a D x K matrix, and tr S suffice: no D x D matrix is ever formed.

An update is one step U' = qf(U + η (I − UUᵀ) 2SU / tr S), followed by mapping every coordinate parameter by
Z' = Z (UᵀU'), the coordinates of the projection of Z Uᵀ on span(U'). A projection changes the model's function;
`BasisUpdate` reports the cost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from thinpipe.core.bounds import Count
from thinpipe.subspace.basis import Basis, orthonormalise
from thinpipe.subspace.parameter_tags import coordinates_of


def descent_direction(basis_DK: Tensor, su_DK: Tensor, trace: Tensor) -> Tensor:
    """Negative Riemannian gradient of the energy outside span(U), divided by tr S. Tangent: Uᵀ(result) = 0."""
    su_DK = 2 * su_DK / trace
    return su_DK - basis_DK @ (basis_DK.T @ su_DK)


def captured_energy(basis_DK: Tensor, su_DK: Tensor, trace: Tensor) -> float:
    """tr(UᵀSU) / tr S, between 0 and 1: the share of the gradients' squared norm that lies in span(U)."""
    return float((basis_DK * su_DK).sum() / trace)


def principal_angles(first_DK: Tensor, second_DK: Tensor) -> Tensor:
    """The K angles in radians between two subspaces, ascending; exact for small angles, where arccos is not. On the
    CPU, in float64."""
    first_DK, second_DK = first_DK.cpu().double(), second_DK.cpu().double()
    overlap_KK = first_DK.T @ second_DK
    sines = torch.linalg.svdvals(second_DK - first_DK @ overlap_KK).flip(0)
    cosines = torch.linalg.svdvals(overlap_KK)
    return torch.atan2(sines.clamp(0, 1), cosines.clamp(0, 1))


@dataclass(frozen=True, kw_only=True)
class BasisUpdate:
    """Effect of one basis update."""

    version: Count
    captured_energy: float
    """Fraction of the last interval's gradient energy inside the old span(U)."""
    largest_angle: float
    """Largest principal angle between old and new subspace, in radians."""
    mean_angle: float
    """Mean principal angle, in radians."""
    orthonormality_error: float
    """max |UᵀU − I| of the new basis."""
    kept_norm: float
    """‖Z'‖/‖Z‖ over all coordinate parameters: 1 when nothing was lost."""
    loss_before: float | None = None
    loss_after: float | None = None


class GrassmannTracker:
    """Accumulates gradients through `observe` and proposes the next basis.

    Set `observe` as `on_gradient` of the last segment. With `step_size` 0 the basis never changes.
    """

    def __init__(self, basis: Basis, *, step_size: float = 1.0) -> None:
        self.step_size = step_size
        self.restart(basis)

    def restart(self, basis: Basis) -> None:
        """Starts an interval with this basis and resets the accumulated gradient statistics."""
        self.basis = basis
        self.su_DK = torch.zeros_like(basis.matrix_DK)
        self.trace = torch.zeros((), dtype=basis.matrix_DK.dtype, device=basis.matrix_DK.device)

    @torch.no_grad()
    def observe(self, gradient_BTD: Tensor) -> None:
        """Adds the gradients of a backward pass. Called outside of autocast, as backward passes are: its end in torch's
        thread for the device would drop the copies that all passes share (`device.precision.keep_casts`)."""
        gradient_ND = gradient_BTD.flatten(0, -2).to(self.su_DK.dtype)
        self.su_DK.addmm_(gradient_ND.T, gradient_ND @ self.basis.matrix_DK)
        self.trace += gradient_ND.square().sum()

    def propose(self) -> Basis:
        """The basis after one Riemannian step, with the next version; the same matrix if all gradients were zero."""
        basis_DK = self.basis.matrix_DK
        if float(self.trace) == 0.0:
            return Basis(basis_DK.clone(), self.basis.version + 1)
        direction_DK = descent_direction(basis_DK, self.su_DK, self.trace)
        moved_DK = basis_DK + self.step_size * direction_DK
        return Basis(orthonormalise(moved_DK), self.basis.version + 1)

    def update(
        self, apply: Callable[[Basis, Basis], float], measure_loss: Callable[[], float] | None = None
    ) -> BasisUpdate:
        """Updates the basis, starts the next interval and reports the effect.

        `apply(old, new)` changes the basis of the model, in all processes, and returns ‖Z'‖/‖Z‖; `measure_loss` is
        called before and after it.
        """
        old, new = self.basis, self.propose()
        captured = captured_energy(old.matrix_DK, self.su_DK, self.trace) if float(self.trace) else 0.0
        loss_before = measure_loss() if measure_loss else None
        kept_norm = apply(old, new)
        angles_K = principal_angles(old.matrix_DK, new.matrix_DK)
        self.restart(new)
        return BasisUpdate(
            version=new.version,
            captured_energy=captured,
            largest_angle=float(angles_K.max()),
            mean_angle=float(angles_K.mean()),
            orthonormality_error=new.orthonormality_error,
            kept_norm=kept_norm,
            loss_before=loss_before,
            loss_after=measure_loss() if measure_loss else None,
        )


class MapsMoments(Protocol):
    """An optimiser whose moments can be mapped to another basis."""

    def map_moments(
        self, parameter: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
    ) -> None:
        """Replaces both moments of a parameter, if it has any, by these functions of them."""
        ...


@torch.no_grad()
def rebase_squares(
    parameters: Mapping[str, nn.Parameter], optimizer: MapsMoments | None, old: Basis, new: Basis
) -> dict[str, tuple[float, float]]:
    """Maps coordinate parameters and their first moments to the new basis; returns ‖Z‖² before and after for each
    parameter, which processes can sum.

    A row-wise second moment does not depend on the basis and stays. An element-wise second moment cannot be rotated: it
    is replaced by its mean over the coordinates, which is invariant under rotation (zero would make the next update
    about 1/sqrt(1 − β2) times too large, because the bias correction is no longer in effect).
    """
    transition_KK = (old.matrix_DK.cpu().double().T @ new.matrix_DK.cpu().double()).to(new.matrix_DK)
    squares: dict[str, tuple[float, float]] = {}
    for name, parameter in parameters.items():
        if (coordinates := coordinates_of(parameter)) is None:
            continue
        before = float(parameter.cpu().double().square().sum())
        parameter.copy_(_along(coordinates.axis, transition_KK, parameter))
        squares[name] = before, float(parameter.cpu().double().square().sum())
        if optimizer is not None:
            optimizer.map_moments(
                parameter,
                partial(_along, coordinates.axis, transition_KK),
                partial(_mean_along, coordinates.axis, parameter.shape),
            )
    return squares


def _along(axis: int, transition_KK: Tensor, coordinates: Tensor) -> Tensor:
    """`coordinates` multiplied by `transition_KK` along `axis`, in the data type of the basis."""
    return (coordinates.to(transition_KK.dtype).movedim(axis, -1) @ transition_KK).movedim(-1, axis)


def _mean_along(axis: int, shape: torch.Size, moment: Tensor) -> Tensor:
    """A second moment of a parameter of this shape: its mean over the coordinates if it is element-wise."""
    return moment.mean(axis, keepdim=True).expand(shape) if moment.shape == shape else moment
