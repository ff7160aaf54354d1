"""Small exchanges among all processes through one of them: two trips of a message, whatever their number.

Built on send and receive alone, so that they run on any process group. The centre is the last process: it is the first
to finish a step, so its receives are posted when the others send.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_UP, _DOWN, _SPREAD = 1, 2, 3
"""Tags of their own, apart from those of a pipeline's messages."""


MOST_BYTES = 64 << 20
"""Of one exchange: a length that comes from a peer is not to be trusted with all memory."""


class Exchange(Protocol):
    """What the processes of a run tell each other beside the messages of the pipeline."""

    rank: int
    size: int

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Over the processes, in their order; every one must give as many."""
        ...

    def largest(self, numbers: Sequence[float]) -> list[float]: ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fills `tensor`, of the same shape everywhere, with that of `source`."""
        ...

    def spread(self, data: bytes, source: int = 0) -> bytes:
        """What `source` gave; what the others give is not looked at."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """In every process, what each gave."""
        ...


class Alone:
    """One process has nobody to ask."""

    rank, size = 0, 1

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    largest = sum

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def spread(self, data: bytes, source: int = 0) -> bytes:  # noqa: ARG002
        return data

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class Star:
    """The processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.centre = self.size - 1

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, torch.Tensor.sum)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, torch.Tensor.amax)

    def _reduce(self, numbers: Sequence[float], over: "Reduction") -> list[float]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self.rank != self.centre:
            result = torch.empty_like(mine)
            answer = self.group.recv([result], self.centre, _DOWN)
            _finish(self.group.send([mine], self.centre, _UP), self.centre)
            _finish(answer, self.centre)
            return _floats(result)
        all_numbers = torch.empty(self.size, len(numbers), dtype=torch.float64)
        all_numbers[self.rank] = mine
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank, work in [(rank, self.group.recv([all_numbers[rank]], rank, _UP)) for rank in others]:
            _finish(work, rank)
        result = over(all_numbers, 0)
        for rank, work in [(rank, self.group.send([result], rank, _DOWN)) for rank in others]:
            _finish(work, rank)
        return _floats(result)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        here = tensor.cpu().contiguous()
        if self.rank != source:
            _finish(self.group.recv([here], source, _SPREAD), source)
            tensor.copy_(here)
            return
        others = [rank for rank in range(self.size) if rank != source]
        for rank, work in [(rank, self.group.send([here], rank, _SPREAD)) for rank in others]:
            _finish(work, rank)

    def spread(self, data: bytes, source: int = 0) -> bytes:
        (length,) = self.sum([float(len(data)) if self.rank == source else 0.0])
        if not 0 <= length <= MOST_BYTES:  # nor NaN
            raise ConnectionError(f"process {source} offers {length:.0f} bytes, more than the {MOST_BYTES} allowed")
        buffer = _tensor_of(data) if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        if length:
            self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        if len(data) > MOST_BYTES:
            raise ConnectionError(f"{len(data)} bytes are more than the {MOST_BYTES} allowed")
        told = self.sum([float(len(data)) if rank == self.rank else 0.0 for rank in range(self.size)])
        if not all(0 <= length <= MOST_BYTES for length in told) or sum(told) > MOST_BYTES:  # nor NaN
            raise ConnectionError(f"the processes offer {sum(told):.0f} bytes, more than the {MOST_BYTES} allowed")
        lengths = list(map(int, told))
        joined = b""
        if self.rank == self.centre:
            parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
            parts[self.rank] = _tensor_of(data)
            others = [rank for rank in range(self.size) if rank != self.rank and lengths[rank]]
            for rank, work in [(rank, self.group.recv([parts[rank]], rank, _UP)) for rank in others]:
                _finish(work, rank)
            joined = torch.cat(parts).numpy().tobytes()
        elif data:
            _finish(self.group.send([_tensor_of(data)], self.centre, _UP), self.centre)
        joined = self.spread(joined, self.centre)
        ends = list(accumulate(lengths))
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class Reduction(Protocol):
    def __call__(self, tensor: Tensor, dim: int, /) -> Tensor: ...


def exchange_of(group: dist.ProcessGroup | None) -> Exchange:
    return Alone() if group is None else Star(group)


def _floats(numbers: Tensor) -> list[float]:
    return [float(number) for number in numbers.tolist()]


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _finish(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionError(f"lost process {peer} of the run: {error}") from None
