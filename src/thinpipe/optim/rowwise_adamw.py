"""AdamW whose updates never leave span(U): one second moment per row of the full-width matrix.

Adam divides every entry of the first moment by its own root-mean-square, which turns a row W_i in span(U) into one
outside it. With a single second moment v_i per row, the mean over the row's D entries, the update only scales the
row (arXiv 2506.01260, section on the optimiser). On the coordinates Z of W = Z Uᵀ the same trajectory needs

    v_i = mean over D of the squared full-width gradient = ‖row i of the gradient of Z‖² / D,

since U keeps norms. Dividing by K instead would make every update sqrt(D/K) smaller than in the paper.
Orthonormal matrices are updated by `stiefel`, all other parameters by torch's own AdamW. Parameters in bfloat16 are
updated by the same rules in float32 (`bf16_update`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thinpipe.device.host_copies import has_pinned_memory
from thinpipe.optim.adamw_moments import update_moments
from thinpipe.optim.bf16_update import read_moment, start_state, step_bf16, write_moment
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


def parameter_groups(
    parameters: Mapping[str, Tensor], tables: Collection[Tensor], *, matrix_lr_factor: float
) -> list[dict[str, Any]]:
    """Groups for the optimiser: matrices, with a factor on their learning rate (`lr_factor`); embedding tables; and
    vectors (norms, biases), without weight decay. Groups that would be empty are left out."""
    matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in matrices.items() if p not in tables], "lr_factor": matrix_lr_factor},
        {"params": [(name, p) for name, p in matrices.items() if p in tables]},
        {"params": [(name, p) for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _coordinates(parameter: Tensor, group: dict[str, Any]) -> Coordinates | None:
    """Tag of a parameter with one second moment per row."""
    return coordinates_of(parameter) if group["second_moment"] == "row" else None


def _rule_of(parameter: Tensor, group: dict[str, Any]) -> Callable[..., None] | None:
    """Function that updates a parameter from its gradient, state and group; None for torch's own AdamW."""
    if is_orthonormal(parameter):
        return step_orthonormal
    coordinates = _coordinates(parameter, group)
    return None if coordinates is None else partial(_step_rows, coordinates)


def _can_be_sliced(parameter: Tensor, group: dict[str, Any]) -> bool:
    """True if each row of the tensor (first axis) can be updated without the others."""
    coordinates = _coordinates(parameter, group)
    return not is_orthonormal(parameter) and (coordinates is None or coordinates.axis != 0)


def _step_rows(
    coordinates: Coordinates, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    mean_square = gradient.square().sum(coordinates.axis, keepdim=True).div_(coordinates.full_width)
    _decay_and_add(parameter, gradient, mean_square, state, group)


def _step_each(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    _decay_and_add(parameter, gradient, gradient.square(), state, group)


def _decay_and_add(
    parameter: Tensor, gradient: Tensor, mean_square: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
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
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        second_moment: SecondMoment = "row",
        fused: bool = True,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        """bfloat16 parameters must be given with their names (as `named_parameters()`), from which, and from `seed`,
        the random bits of stochastic rounding are drawn."""
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
            "seed": seed,
        }
        self.gradient_factor = 1.0
        """Factor on the gradients of bfloat16 parameters, applied in float32 by `step`."""
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
                rule = _rule_of(part.whole, group)
                if part.whole.dtype == torch.bfloat16:
                    step_bf16(
                        part.parameter,
                        part.gradient,
                        part.state,
                        partial(rule or _step_each, group=group),
                        gradient_factor=self.gradient_factor,
                        sliced=_can_be_sliced(part.whole, group),
                        words=(group["seed"], "update", part.name),
                        start=part.start,
                    )
                elif rule:
                    rule(part.parameter, part.gradient, part.state, group=group)
                else:
                    ordinary.append(part)
            self._step_elements(ordinary, group)
        return loss

    @torch.no_grad()
    def map_moments(
        self, parameter: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
    ) -> None:
        """Replaces both moments of a parameter, if it has any, by these functions of them; 8-bit moments are decoded,
        and rounded to nearest."""
        if state := self.state.get(parameter):
            with on_device(state, parameter.device) if self.offload else nullcontext(state) as here:
                for name, function in (("exp_avg", first), ("exp_avg_sq", second)):
                    write_moment(here, name, function(read_moment(here, name)))

    def set_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Gives a parameter this state, for example that of a checkpoint."""
        if self.offload:
            self.state[parameter] = to_host(state, parameter.device)
        else:
            self.state[parameter] = {name: tensor.to(parameter.device) for name, tensor in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Unlike torch's, keeps the data types of the moments of bfloat16 parameters, which are not bfloat16, and
        state that belongs in host memory there."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"] and (self.offload or parameter.dtype == torch.bfloat16):
                    moments = state_dict["state"][key].items()
                    self.set_state(parameter, {name: value.clone() for name, value in moments})

    def _batches(self) -> Iterable[Batch]:
        """Parameters that have a gradient, with their state on their device."""
        groups: list[Batch] = []
        for group in self.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            named = [(name, p) for name, p in zip(names, group["params"], strict=True) if p.grad is not None]
            for _, parameter in named:
                if not self.state[parameter]:
                    self.state[parameter] = self._start_state(parameter, group)
            groups.append((group, [Part(parameter, self.state[parameter], name) for name, parameter in named]))
        return streamed(groups, self._device) if self.offload else groups

    def _start_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        shape = second_moment_shape(parameter, group["second_moment"])
        like = torch.empty_like(parameter, device="cpu") if self.offload else parameter
        if parameter.dtype == torch.bfloat16:
            if "param_names" not in group:
                raise ValueError("bfloat16 parameters need names: pass model.named_parameters()")
            state = start_state(like, shape)
        else:
            # torch's fused kernel needs the step count on the parameter's device; all other code reads it on the CPU.
            beside = group["fused"] and shape == parameter.shape
            state = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if beside else "cpu"),
                "exp_avg": torch.zeros_like(like, memory_format=torch.preserve_format),
                "exp_avg_sq": like.new_zeros(shape),
            }
        return to_host(state, parameter.device) if self.offload else state

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
