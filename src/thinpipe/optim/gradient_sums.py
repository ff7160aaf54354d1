"""Sums of the gradients of micro-batches in bfloat16, with stochastic rounding; norms of gradients.

autograd rounds sums of bfloat16 gradients to nearest: of many micro-batches, each would add less and less. A sum here
has the right mean, whatever the number of micro-batches. A gradient is added as soon as autograd has computed it, and
freed, so that no second set of gradients exists.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from thinpipe.device.counter_random import random_bits, round_to_bf16
from thinpipe.optim.bf16_update import row_slices


class GradientSums:
    """Replaces autograd's own accumulation in `grad` for these parameters.

    Not for backward passes that do not call the hooks of parameters, as the split ones of zero-bubble schedules.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, seed: int) -> None:
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self.seed, self.step = seed, 0
        self._sums: dict[Tensor, tuple[int, Tensor]] = {}
        """By parameter: number of micro-batches so far, and the sum of their gradients."""
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._add)

    def begin(self, step: int) -> None:
        """Starts new sums, for the step with this index."""
        self.step = step
        self._sums.clear()

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        microbatch, total = self._sums.get(parameter, (0, gradient))
        self._sums[parameter] = microbatch + 1, total
        if microbatch == 0:
            return
        words = self.seed, "gradient", self.step, self.names[parameter], microbatch
        width = parameter[0].numel()
        for rows in row_slices(parameter):
            exact = total[rows].float().add_(gradient[rows])
            total[rows] = round_to_bf16(exact, random_bits(exact, *words, start=rows.start * width))

    def finish(self) -> None:
        """Puts the sums into `grad`, after the last micro-batch."""
        for parameter, (_count, total) in self._sums.items():
            parameter.grad = total


def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Norm of each gradient in `grad`, by the name of its parameter; of bfloat16 gradients in float32."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    is_bf16 = any(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
    norms = torch._foreach_norm([*gradients.values()], 2, torch.float32 if is_bf16 else None)
    return dict(zip(gradients, torch.stack(list(norms)).tolist(), strict=True))
