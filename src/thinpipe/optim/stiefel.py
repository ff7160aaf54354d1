"""Optimiser step on the Stiefel manifold, for matrices whose columns stay orthonormal.

The gradient is projected to the tangent space, averaged (first moment) and divided by one root mean square for the
whole matrix (AdamW's, per entry, would turn the step out of the tangent space); a QR decomposition of the sum restores
orthonormal columns. There is no weight decay: the norm of every column is 1.
"""

from typing import Any

from torch import Tensor

from thinpipe.optim.adamw_moments import update_moments
from thinpipe.subspace.basis import orthonormalise


def step_orthonormal(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Updates `parameter` and its optimiser `state` in place, with the hyperparameters of `group`."""
    tangent_DK = _tangent(parameter, gradient)
    step_size, denominator = update_moments(state, tangent_DK, tangent_DK.square().mean().view(1, 1), group)
    along_DK = _tangent(parameter, state["exp_avg"])  # the average includes tangents of earlier points
    parameter.copy_(orthonormalise(parameter - step_size * along_DK / denominator))


def _tangent(parameter: Tensor, matrix_DK: Tensor) -> Tensor:
    """Projection of `matrix_DK` on the tangent space of the Stiefel manifold at `parameter`."""
    inner_KK = parameter.T @ matrix_DK
    return matrix_DK - parameter @ (inner_KK + inner_KK.T) / 2
