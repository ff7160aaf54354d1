"""Optimiser step of a bfloat16 parameter: weights and moments are read as float32 slice by slice, updated by the same
rule as float32 parameters, and stored with stochastic rounding.

Nearest rounding would lose every update below 1/512 of its weight; stochastic rounding keeps updates in the mean
(arXiv 2010.06192). Moments of matrices are stored in 8 bits (`eight_bit`), the few of norms, biases and row-wise rules
in float32. Random bits are drawn from the parameter's name and the step, so that neither placement nor device nor the
size of slices changes a result.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thinpipe.config.precision import DEVICE_SLICE, MOMENT_BLOCK, is_eight_bit, slice_rows
from thinpipe.device.counter_random import random_bits, round_to_bf16
from thinpipe.optim.eight_bit import decode, empty_codes, encode

_CPU_SLICE = 1 << 17
"""Most numbers of a parameter that a CPU updates at a time: few enough for its cache. Results do not depend on it."""
_MOMENT_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}

Rule = Callable[[Tensor, Tensor, dict[str, Any]], None]
"""Updates float32 weights in place, from their gradient and a state with the step count and float32 moments."""


def start_state(parameter: Tensor, second_moment_shape: torch.Size) -> dict[str, Any]:
    """Moments of zero. Beside each 8-bit moment: the `max` of its blocks, by the name of the moment with _max."""
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, shape in (("exp_avg", parameter.shape), ("exp_avg_sq", second_moment_shape)):
        if is_eight_bit(parameter.shape, shape.numel()):
            state[name], state[f"{name}_max"] = empty_codes(parameter, _MOMENT_CODES[name])
        else:
            state[name] = parameter.new_zeros(shape, dtype=torch.float32)
    return state


def step_bf16(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    rule: Rule,
    *,
    gradient_factor: float,
    sliced: bool,
    words: tuple[Any, ...],
    start: int = 0,
) -> None:
    """Updates `parameter` and its optimiser `state` in place.

    `gradient_factor`: factor on the gradient, applied in float32. `sliced`: False for a rule that needs the whole
    parameter at once. `words`: seed and name, from which random bits are drawn. `start`: position of the first
    number, where `parameter` is a slice of a larger one.
    """
    updated = state["step"]
    for rows in row_slices(parameter) if sliced else [slice(0, len(parameter))]:
        weights = parameter[rows].float()
        wide = {"step": state["step"]} | {name: read_moment(state, name, rows) for name in _MOMENT_CODES}
        rule(weights, gradient[rows].float().mul_(gradient_factor), wide)
        updated = wide["step"]
        bits = random_bits(weights, *words, int(updated), start=start + _numbers(parameter, rows).start)
        for name, shift in (("exp_avg", 16), ("exp_avg_sq", 24)):
            write_moment(state, name, wide[name], rows, (bits >> shift).bitwise_and_(0xFF))
        parameter[rows] = round_to_bf16(weights, bits)
    state["step"] = updated


def row_slices(parameter: Tensor) -> Iterator[slice]:
    """Slices of rows (first axis), which begin at whole blocks of 8-bit moments whatever the width of a row is."""
    count = slice_rows(parameter.shape, _CPU_SLICE if parameter.device.type == "cpu" else DEVICE_SLICE)
    return (slice(start, min(start + count, len(parameter))) for start in range(0, len(parameter), count))


def read_moment(state: dict[str, Any], name: str, rows: slice = slice(None)) -> Tensor:
    """Rows of a moment in float32: decoded, or a view of what is float32 already. Rows are whole blocks."""
    moment: Tensor = state[name]
    if f"{name}_max" not in state:
        return moment[rows]
    return decode(moment[rows], state[f"{name}_max"][_blocks(moment, rows)])


def write_moment(
    state: dict[str, Any], name: str, values: Tensor, rows: slice = slice(None), random: Tensor | None = None
) -> None:
    """Stores what `read_moment` reads. `random`: as for `eight_bit.encode`."""
    moment: Tensor = state[name]
    if f"{name}_max" in state:
        moment[rows], state[f"{name}_max"][_blocks(moment, rows)] = encode(values, moment.dtype, random)
    else:
        moment[rows] = values


def _numbers(tensor: Tensor, rows: slice) -> slice:
    """Positions of these rows in the flattened tensor."""
    start, stop, _ = rows.indices(len(tensor))
    width = tensor[0].numel()
    return slice(start * width, stop * width)


def _blocks(moment: Tensor, rows: slice) -> slice:
    numbers = _numbers(moment, rows)
    return slice(numbers.start // MOMENT_BLOCK, -(-numbers.stop // MOMENT_BLOCK))
