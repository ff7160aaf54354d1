"""AdamW whose updates never leave span(U): one second moment per row of the full-width matrix.

Adam divides every entry of the first moment by its own root-mean-square, which turns a row W_i in span(U) into one
outside it. With a single second moment v_i per row, the mean over the row's D entries, the update only scales the
row (arXiv 2506.01260, section on the optimiser). On the coordinates Z of W = Z Uᵀ the same trajectory needs

    v_i = mean over D of the squared full-width gradient = ‖row i of the gradient of Z‖² / D,

since U keeps norms. Dividing by K instead would make every update sqrt(D/K) smaller than in the paper.
Orthonormal matrices are updated by `stiefel`, all other parameters by torch's own AdamW.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thinpipe.device.host_copies import has_pinned_memory
from thinpipe.optim.adamw_moments import update_moments
from thinpipe.optim.parameter_parts import Batch, Part, State, on_device, streamed, to_host
from thinpipe.optim.stiefel import step_orthonormal
from thinpipe.subspace.parameter_tags import Coordinates, coordinates_of, is_orthonormal

SecondMoment = Literal["row", "element"]


def second_moment_shape(parameter: Tensor, second_moment: SecondMoment) -> torch.Size:
    """Shape of a parameter's second moment: one number per row of the full-width matrix, or one per entry; a single
    number for an orthonormal matrix."""
    if is_orthonormal(parameter):
        return torch.Size((1, 1))
    coordinates = coordinates_of(parameter) if second_moment == "row" else None
    if coordinates is None:
        return parameter.shape
    return torch.Size(1 if axis == coordinates.axis else size for axis, size in enumerate(parameter.shape))


def _coordinates(parameter: Tensor, group: dict[str, Any]) -> Coordinates | None:
    """Tag of a parameter with one second moment per row."""
    return coordinates_of(parameter) if group["second_moment"] == "row" else None


def _rule_of(parameter: Tensor, group: dict[str, Any]) -> Callable[..., None] | None:
    """Function that updates a parameter from its gradient, state and group; None for torch's own AdamW."""
    if is_orthonormal(parameter):
        return step_orthonormal
    coordinates = _coordinates(parameter, group)
    return None if coordinates is None else partial(_step_rows, coordinates)


def _step_rows(
    coordinates: Coordinates, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    mean_square = gradient.square().sum(coordinates.axis, keepdim=True).div_(coordinates.full_width)
    step_size, denominator = update_moments(state, gradient, mean_square, group)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], denominator, value=-step_size)


class RowwiseAdamW(torch.optim.Optimizer):
    """AdamW with a row-wise second moment for coordinate parameters (see `subspace.parameter_tags`).

    `second_moment="row"` is the paper's rule; "element" is plain AdamW on the coordinates. `offload` keeps the state in
    host memory and streams it through the device in `step`, without effect on a device that computes in host memory.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        second_moment: SecondMoment = "row",
        fused: bool = True,
        offload: bool = False,
    ) -> None:
        if second_moment not in ("row", "element"):
            raise ValueError(f'second_moment is "row" or "element", not {second_moment!r}')
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"out of range: lr={lr} betas={betas} eps={eps} weight_decay={weight_decay}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "second_moment": second_moment,
            "fused": fused,
        }
        super().__init__(params, defaults)
        self._device = next(parameter.device for group in self.param_groups for parameter in group["params"])
        self.offload = offload and has_pinned_memory(self._device)

    # torch wraps these so that torch.compile ignores them. The wrapper imports torch._dynamo and sympy at the first
    # call, over a second of processor time.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parts in self._batches():
            ordinary: list[Part] = []
            for part in parts:
                if rule := _rule_of(part.whole, group):
                    rule(part.parameter, part.gradient, part.state, group)
                else:
                    ordinary.append(part)
            self._step_elements(ordinary, group)
        return loss

    def set_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Gives a parameter this state, for example that of a checkpoint."""
        if self.offload:
            self.state[parameter] = to_host(state, parameter.device)
        else:
            self.state[parameter] = {name: tensor.to(parameter.device) for name, tensor in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            self.set_state(parameter, state)

    @contextmanager
    def moments(self, parameter: Tensor) -> Iterator[State]:
        """State of a parameter on its device, to be read and changed in place; empty before the first step."""
        state: State = self.state.get(parameter, {})
        with on_device(state, parameter.device) if self.offload else nullcontext(state) as here:
            yield here

    def _batches(self) -> Iterable[Batch]:
        groups: list[Batch] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self._start_state(parameter, group)
            groups.append((group, [Part(parameter, self.state[parameter]) for parameter in parameters]))
        return streamed(groups, self._device) if self.offload else groups

    def _start_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        shape = second_moment_shape(parameter, group["second_moment"])
        # torch's fused kernel needs the step count on the parameter's device; all other code reads it on the CPU.
        beside = group["fused"] and shape == parameter.shape
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if beside else "cpu")
        like = torch.empty_like(parameter, device="cpu") if self.offload else parameter
        moments = {
            "exp_avg": torch.zeros_like(like, memory_format=torch.preserve_format),
            "exp_avg_sq": like.new_zeros(shape),
        }
        self.state[parameter] = {"step": step} | (to_host(moments, parameter.device) if self.offload else moments)

    def _step_elements(self, parts: list[Part], group: dict[str, Any]) -> None:
        if not parts:
            return
        states = [part.state for part in parts]
        beta1, beta2 = group["betas"]
        adamw(
            [part.parameter for part in parts],
            [part.gradient for part in parts],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
