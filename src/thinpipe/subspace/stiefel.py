"""Matrices whose columns stay orthonormal while they are trained: a step along the Stiefel manifold.

The gradient is projected to the tangent space, averaged, divided by one root mean square for the whole matrix (as AdamW
does for each entry, but a number for each entry would turn the step out of the tangent space), and the sum is brought
back to orthonormal columns with a QR decomposition. There is no weight decay: the norm of every column is 1.
"""

from typing import Any

import torch
from torch import Tensor


def mark_orthonormal(parameter: Tensor) -> None:
    parameter.thinpipe_orthonormal = True  # type: ignore[attr-defined]


def is_orthonormal(parameter: Tensor) -> bool:
    return getattr(parameter, "thinpipe_orthonormal", False)


def orthonormalise(matrix_DK: Tensor) -> Tensor:
    """The Q of its QR decomposition, with the signs that make it unique."""
    q_DK, r_KK = torch.linalg.qr(matrix_DK.double())
    signs_K = torch.where(r_KK.diagonal() < 0, -1.0, 1.0)
    unique_DK: Tensor = q_DK * signs_K
    return unique_DK.to(matrix_DK.dtype)


def step_orthonormal(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    gradient = parameter.grad
    assert gradient is not None
    beta1, beta2 = group["betas"]
    state["step"] = state["step"].cpu() + 1
    step = int(state["step"])
    tangent_DK = _tangent(parameter, gradient)
    state["exp_avg"].lerp_(tangent_DK, 1 - beta1)
    state["exp_avg_sq"].lerp_(tangent_DK.square().mean().view(1, 1), 1 - beta2)
    size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    along_DK = _tangent(parameter, state["exp_avg"])  # it was averaged at other points, too
    parameter.copy_(orthonormalise(parameter - group["lr"] / (1 - beta1**step) * along_DK / size))


def _tangent(parameter: Tensor, matrix_DK: Tensor) -> Tensor:
    inner_KK = parameter.T @ matrix_DK
    return matrix_DK - parameter @ (inner_KK + inner_KK.T) / 2
