"""Collectives for small data (reduce, broadcast, gather) with star topology: two message latencies for any group size.

Built on send and recv only, so they run on any process group. The root is the last process: it finishes a step first,
so its receives are posted before the others send. `StarCollectives` offers them to a run, `GroupCollectives` to torch.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.transport.pending_work import finished_work
from thinpipe.transport.reduction import MAX_NBYTES, ReduceOp, reduce_rows

_GATHER_TAG, _RESULT_TAG, _BROADCAST_TAG = 1, 2, 3
"""Message tags; distinct from the tags of pipeline messages (`pipeline/p2p.py`)."""


class Collectives(Protocol):
    """Blocking collectives of a run for control data, apart from pipeline messages. All processes must call in the same
    order. Raises ConnectionError when a process is lost."""

    rank: int
    size: int

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over the processes, in rank order; every process must pass the same number of values."""
        ...

    def all_reduce_counts(self, counts: Sequence[int]) -> list[int]:
        """Like `all_reduce_sum`, for numbers of bytes. Raises ConnectionError where a sum is no such number."""
        ...

    def all_equal(self, numbers: Sequence[float]) -> list[bool]:
        """For each number: have all processes passed the same?"""
        ...

    def all_reduce_step(self, numbers: Sequence[float]) -> list[float]:
        """Like `all_reduce_sum`, for the vector of a step, which whoever makes the sum may read."""
        ...

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

    def all_reduce_counts(self, counts: Sequence[int]) -> list[int]:
        return list(counts)

    def all_equal(self, numbers: Sequence[float]) -> list[bool]:
        return [True] * len(numbers)

    def all_reduce_step(self, numbers: Sequence[float]) -> list[float]:
        return self.all_reduce_sum(numbers)

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

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return self._all_reduce("sum", numbers)

    def all_reduce_counts(self, counts: Sequence[int]) -> list[int]:
        sums = self._all_reduce("counts", counts)
        if not all(0 <= number <= MAX_NBYTES for number in sums) or sum(sums) > MAX_NBYTES:  # also true for NaN
            raise ConnectionError(f"the processes offer {sum(sums):.0f} bytes, more than the {MAX_NBYTES} allowed")
        return list(map(int, sums))

    def all_equal(self, numbers: Sequence[float]) -> list[bool]:
        row = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float64)
        extremes = _all_reduce(self.group, "max", row).tolist()
        return [high == -low for high, low in zip(extremes[: len(numbers)], extremes[len(numbers) :], strict=True)]

    def all_reduce_step(self, numbers: Sequence[float]) -> list[float]:
        return self.all_reduce_sum(numbers)

    def _all_reduce(self, op: Literal["sum", "counts"], numbers: Sequence[float]) -> list[float]:  # noqa: ARG002
        """Sum over the processes. `op`: what is summed, for who adds it up."""
        reduced: list[float] = _all_reduce(self.group, "sum", torch.tensor(numbers, dtype=torch.float64)).tolist()
        return reduced

    def broadcast(self, tensor: Tensor, source: int) -> None:
        _broadcast(self.group, tensor, source)

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        _refuse_too_long(data)
        (length,) = self.all_reduce_counts([len(data) if self.rank == source else 0])
        buffer = _tensor_of(data) if self.rank == source else torch.empty(length, dtype=torch.uint8)
        if length:
            self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        _refuse_too_long(data)
        lengths = self.all_reduce_counts([len(data) if rank == self.rank else 0 for rank in range(self.size)])
        parts = _gather(self.group, _tensor_of(data), lengths)
        joined = self.broadcast_bytes(b"" if parts is None else torch.cat(parts).numpy().tobytes(), self.size - 1)
        ends = list(accumulate(lengths))
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _refuse_too_long(data: bytes) -> None:
    if len(data) > MAX_NBYTES:
        raise ConnectionError(f"{len(data)} bytes are more than the {MAX_NBYTES} allowed")


def collectives_for(group: dist.ProcessGroup | None) -> Collectives:
    return LocalCollectives() if group is None else StarCollectives(group)


_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


class GroupCollectives(dist.ProcessGroup):
    """Mixin: adds blocking c10d collectives to a group with `send` and `recv`. All processes must take part in each
    call. Meant for the small, rare collectives that torch calls while it sets up a group."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        _broadcast(self, tensor.detach(), opts.rootRank)
        return finished_work()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        op = _OPS.get(opts.reduceOp.op)
        if op is None:
            raise NotImplementedError("a reduction other than sum, average, maximum and minimum")
        tensor.detach().copy_(_all_reduce(self, op, tensor.detach().cpu().contiguous()))
        return finished_work()

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        (tensor,), (targets,) = inputs, outputs
        here = tensor.detach().cpu().contiguous()
        parts = _gather(self, here.view(-1), [here.numel()] * self.size())
        joined = here.new_empty(self.size() * here.numel()) if parts is None else torch.cat(parts)
        _broadcast(self, joined, self.size() - 1)
        for target, part in zip(targets, joined.view(self.size(), *here.shape), strict=True):
            target.copy_(part)
        return finished_work()

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        _all_reduce(self, "sum", torch.zeros(1))
        return finished_work()


def _all_reduce(group: dist.ProcessGroup, op: ReduceOp, row: Tensor) -> Tensor:
    """Reduction of the contiguous CPU tensors `row` of all processes, computed by the root (see `reduce_rows`)."""
    root = group.size() - 1
    if group.rank() != root:
        result = torch.empty_like(row)
        answer = group.recv([result], root, _RESULT_TAG)  # posted first: the root's send waits for it in gloo
        _gather(group, row.view(-1), [row.numel()] * group.size())
        _wait_for(answer, root)
        return result
    rows = _gather(group, row.view(-1), [row.numel()] * group.size())
    assert rows is not None
    dtype = torch.float64 if row.is_floating_point() or op == "avg" else torch.int64
    reduced = reduce_rows(op, [other.to(dtype).numpy() for other in rows])
    result = torch.from_numpy(reduced).to(row.dtype).view(row.shape)
    _send_to_others(group, result, _RESULT_TAG)
    return result


def _gather(group: dist.ProcessGroup, row: Tensor, lengths: Sequence[int]) -> list[Tensor] | None:
    """In the root, the one-dimensional CPU tensors of all processes in rank order; None elsewhere. `lengths`: numbers
    of elements of all processes; an empty tensor is not sent."""
    root = group.size() - 1
    if group.rank() != root:
        if row.numel():
            _wait_for(group.send([row], root, _GATHER_TAG), root)
        return None
    rows = [*(row.new_empty(length) for length in lengths[:-1]), row]
    others = [rank for rank in range(root) if lengths[rank]]
    for rank, work in [(rank, group.recv([rows[rank]], rank, _GATHER_TAG)) for rank in others]:
        _wait_for(work, rank)
    return rows


def _broadcast(group: dist.ProcessGroup, tensor: Tensor, source: int) -> None:
    """Overwrites `tensor` with that of rank `source`."""
    here = tensor.cpu().contiguous()
    if group.rank() == source:
        _send_to_others(group, here, _BROADCAST_TAG)
        return
    _wait_for(group.recv([here], source, _BROADCAST_TAG), source)
    tensor.copy_(here)


def _send_to_others(group: dist.ProcessGroup, tensor: Tensor, tag: int) -> None:
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for rank, work in [(rank, group.send([tensor], rank, tag)) for rank in others]:
        _wait_for(work, rank)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _wait_for(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionError(f"lost process {peer} of the run: {error}") from None
