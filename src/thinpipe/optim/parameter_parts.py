"""Parts of parameters, each with its optimiser state on the parameter's device: what an update computes at a time.

Without offload a part is a whole parameter with the state that the optimiser holds. With offload (`training.offload`)
the state is in host memory, and parts come batch by batch, their state streamed through the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinpipe.config.offload import batches_of_rows
from thinpipe.config.precision import MOMENT_BLOCK
from thinpipe.device.host_copies import pinned, stream_through

State = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Rows (first axis) of a parameter, or a whole parameter."""

    whole: Tensor
    state: State
    """State of these rows."""
    name: str = ""
    """Name of the whole parameter."""
    rows: slice | None = None
    """None: the whole parameter."""

    @property
    def parameter(self) -> Tensor:
        return self.whole if self.rows is None else self.whole[self.rows]

    @property
    def gradient(self) -> Tensor:
        gradient = self.whole.grad
        assert gradient is not None
        return gradient if self.rows is None else gradient[self.rows]

    @property
    def start(self) -> int:
        """Position of the first number in the whole parameter."""
        return 0 if self.rows is None else self.rows.start * self.whole[0].numel()


Batch = tuple[dict[str, Any], list[Part]]
"""Hyperparameters, and the parts to update with them."""


def to_host(state: Mapping[str, Tensor], device: torch.device) -> State:
    """State of a parameter on `device`, in host memory; single numbers, such as the step count, on the device."""
    return {name: pinned(tensor) if tensor.dim() else tensor.to(device) for name, tensor in state.items()}


@contextmanager
def on_device(state: State, device: torch.device) -> Iterator[State]:
    """State that is in host memory, whole on `device`, to be read and changed in place."""
    moving = _moving(state)
    for tensors in stream_through([list(moving.values())], device):
        yield state | dict(zip(moving, tensors, strict=True))


def streamed(groups: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches of few parts (`config.offload`), with the state of each part on `device`. Changes by the update are in
    host memory when the iterator has ended.

    `groups`: whole parameters, with their state in host memory. A parameter can be sliced if every tensor of its state
    has one row for each of its rows, or one number for each block of numbers that share a scale.
    """
    batches = [
        (hyperparameters, [(parts[index], _slice(parts[index], rows)) for index, rows in batch])
        for hyperparameters, parts in groups
        for batch in batches_of_rows([_rows(part) for part in parts])
    ]
    on_host = [[tensor for _, part in batch for tensor in _moving(part.state).values()] for _, batch in batches]
    for (hyperparameters, batch), tensors in zip(batches, stream_through(on_host, device), strict=True):
        arrived = iter(tensors)
        parts = [
            replace(part, state=part.state | {name: next(arrived) for name in _moving(part.state)}) for _, part in batch
        ]
        yield hyperparameters, parts
        for (whole, _), part in zip(batch, parts, strict=True):
            whole.state.update({name: tensor for name, tensor in part.state.items() if not tensor.dim()})


def _rows(part: Part) -> tuple[int, int]:
    """Number of rows, and bytes of state per row; one row if the parameter cannot be sliced."""
    tensors = list(_moving(part.state).values())
    can_be_sliced = part.whole.dim() and all(_counts_rows(t, part) or _counts_blocks(t, part) for t in tensors)
    n_rows = len(part.whole) if can_be_sliced else 1
    return n_rows, -(-sum(tensor.nbytes for tensor in tensors) // n_rows)


def _counts_rows(tensor: Tensor, part: Part) -> bool:
    return len(tensor) == len(part.whole)


def _counts_blocks(tensor: Tensor, part: Part) -> bool:
    return tensor.dim() == 1 < part.whole.dim() and len(tensor) == -(-part.whole.numel() // MOMENT_BLOCK)


def _slice(part: Part, rows: range) -> Part:
    """These rows of a whole parameter. Single numbers are copies, because every slice counts the step."""
    copies = {name: tensor.clone() for name, tensor in part.state.items() if not tensor.dim()}
    if len(rows) == _rows(part)[0]:
        return replace(part, state=part.state | copies)
    chosen, width = slice(rows.start, rows.stop), part.whole[0].numel()
    blocks = slice(rows.start * width // MOMENT_BLOCK, -(-rows.stop * width // MOMENT_BLOCK))
    slices = {
        name: tensor[chosen if _counts_rows(tensor, part) else blocks] for name, tensor in _moving(part.state).items()
    }
    return replace(part, state=slices | copies, rows=chosen)


def _moving(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if tensor.dim()}
