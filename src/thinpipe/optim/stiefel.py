"""Optimiser step on the Stiefel manifold, for matrices whose columns stay orthonormal.

The gradient is projected to the tangent space, averaged (first moment) and divided by one root mean square for the
whole matrix (AdamW's, per entry, would turn the step out of the tangent space); a QR decomposition of the sum restores
orthonormal columns. There is no weight decay: the norm of every column is 1.
"""

from typing import Any

from torch import Tensor

from thinpipe.subspace.basis import orthonormalise


def step_orthonormal(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Updates `parameter` and its optimiser `state` in place, with the hyperparameters of `group`."""
    gradient = parameter.grad
    assert gradient is not None
    beta1, beta2 = group["betas"]
    state["step"] = state["step"].cpu() + 1
    step = int(state["step"])
    tangent_DK = _tangent(parameter, gradient)
    state["exp_avg"].lerp_(tangent_DK, 1 - beta1)
    state["exp_avg_sq"].lerp_(tangent_DK.square().mean().view(1, 1), 1 - beta2)
    size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    along_DK = _tangent(parameter, state["exp_avg"])  # the average includes tangents of earlier points
    parameter.copy_(orthonormalise(parameter - group["lr"] / (1 - beta1**step) * along_DK / size))


def _tangent(parameter: Tensor, matrix_DK: Tensor) -> Tensor:
    """Projection of `matrix_DK` on the tangent space of the Stiefel manifold at `parameter`."""
    inner_KK = parameter.T @ matrix_DK
    return matrix_DK - parameter @ (inner_KK + inner_KK.T) / 2
