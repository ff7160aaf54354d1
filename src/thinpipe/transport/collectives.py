"""Collectives for small data (reduce, broadcast, gather) with star topology: two message latencies for any group size.

Built on send and recv only, so they run on any process group. The root is the last process: it finishes a step first,
so its receives are posted before the others send.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_REDUCE_TAG, _RESULT_TAG, _BROADCAST_TAG = 1, 2, 3
"""Message tags; distinct from the tags of pipeline messages (`pipeline/p2p.py`) and `group_collectives`."""


MAX_NBYTES = 64 << 20
"""Maximum bytes of one collective: lengths announced by peers are untrusted and must not exhaust memory."""


class Collectives(Protocol):
    """Blocking collectives of a run for control data, apart from pipeline messages. All processes must call in the same
    order. Raises ConnectionError when a process is lost."""

    rank: int
    size: int

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over the processes, in rank order; every process must pass the same number of values."""
        ...

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]: ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites `tensor`, of the same shape in all processes, with that of rank `source`."""
        ...

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        """The data of rank `source`; the data of the other processes is ignored."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of every process, in rank order."""
        ...


class LocalCollectives:
    """Collectives of a single process."""

    rank, size = 0, 1

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    all_reduce_max = all_reduce_sum

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:  # noqa: ARG002
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class StarCollectives:
    """Collectives over a process group, through the last rank as root."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.root = self.size - 1

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, torch.Tensor.sum)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, torch.Tensor.amax)

    def _reduce(self, numbers: Sequence[float], reduction: "Reduction") -> list[float]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self.rank != self.root:
            result = torch.empty_like(mine)
            answer = self.group.recv([result], self.root, _RESULT_TAG)
            _wait_for(self.group.send([mine], self.root, _REDUCE_TAG), self.root)
            _wait_for(answer, self.root)
            return _floats(result)
        all_numbers = torch.empty(self.size, len(numbers), dtype=torch.float64)
        all_numbers[self.rank] = mine
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank, work in [(rank, self.group.recv([all_numbers[rank]], rank, _REDUCE_TAG)) for rank in others]:
            _wait_for(work, rank)
        result = reduction(all_numbers, 0)
        for rank, work in [(rank, self.group.send([result], rank, _RESULT_TAG)) for rank in others]:
            _wait_for(work, rank)
        return _floats(result)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        here = tensor.cpu().contiguous()
        if self.rank != source:
            _wait_for(self.group.recv([here], source, _BROADCAST_TAG), source)
            tensor.copy_(here)
            return
        others = [rank for rank in range(self.size) if rank != source]
        for rank, work in [(rank, self.group.send([here], rank, _BROADCAST_TAG)) for rank in others]:
            _wait_for(work, rank)

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        (length,) = self.all_reduce_sum([float(len(data)) if self.rank == source else 0.0])
        if not 0 <= length <= MAX_NBYTES:  # also true for NaN
            raise ConnectionError(f"process {source} offers {length:.0f} bytes, more than the {MAX_NBYTES} allowed")
        buffer = _tensor_of(data) if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        if length:
            self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        if len(data) > MAX_NBYTES:
            raise ConnectionError(f"{len(data)} bytes are more than the {MAX_NBYTES} allowed")
        announced = self.all_reduce_sum([float(len(data)) if rank == self.rank else 0.0 for rank in range(self.size)])
        if not all(0 <= length <= MAX_NBYTES for length in announced) or sum(announced) > MAX_NBYTES:  # also for NaN
            raise ConnectionError(f"the processes offer {sum(announced):.0f} bytes, more than the {MAX_NBYTES} allowed")
        lengths = list(map(int, announced))
        joined = b""
        if self.rank == self.root:
            parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
            parts[self.rank] = _tensor_of(data)
            others = [rank for rank in range(self.size) if rank != self.rank and lengths[rank]]
            for rank, work in [(rank, self.group.recv([parts[rank]], rank, _REDUCE_TAG)) for rank in others]:
                _wait_for(work, rank)
            joined = torch.cat(parts).numpy().tobytes()
        elif data:
            _wait_for(self.group.send([_tensor_of(data)], self.root, _REDUCE_TAG), self.root)
        joined = self.broadcast_bytes(joined, self.root)
        ends = list(accumulate(lengths))
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class Reduction(Protocol):
    def __call__(self, tensor: Tensor, dim: int, /) -> Tensor: ...


def collectives_for(group: dist.ProcessGroup | None) -> Collectives:
    return LocalCollectives() if group is None else StarCollectives(group)


def _floats(numbers: Tensor) -> list[float]:
    return [float(number) for number in numbers.tolist()]


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _wait_for(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionError(f"lost process {peer} of the run: {error}") from None
