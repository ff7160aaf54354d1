"""AdamW's moments with their bias corrections: the arithmetic that row-wise AdamW and the Stiefel step share."""

from typing import Any

from torch import Tensor


def update_moments(
    state: dict[str, Any], gradient: Tensor, mean_square: Tensor, group: dict[str, Any]
) -> tuple[float, Tensor]:
    """Counts the step and moves both moments in `state` towards `gradient` and `mean_square`, in place.

    Returns the step size (learning rate over the bias correction of the first moment) and the denominator (root of the
    corrected second moment, plus epsilon): the update is -step size * exp_avg / denominator.
    """
    beta1, beta2 = group["betas"]
    state["step"] = state["step"].cpu() + 1  # load_state_dict may have moved it to the parameter's device
    step = int(state["step"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].lerp_(mean_square, 1 - beta2)
    denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return group["lr"] / (1 - beta1**step), denominator
