"""Leases of data: batches that a replica trains on in a round. Every batch of the run is counted once: what a lost or
slow replica has not done is handed out again, first. Pure.

A batch is `training.global_batch_size` samples; batch `n` is what step `n` of a run of one replica trains on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Ranges = tuple[range, ...]


def joined(ranges: Iterable[range]) -> Ranges:
    """The same batches in as few ranges as possible, in order. Raises ValueError if one is there twice."""
    found: list[range] = []
    for each in sorted((each for each in ranges if each), key=lambda each: each.start):
        if found and each.start < found[-1].stop:
            raise ValueError(f"batch {each.start} is there twice")
        if found and each.start == found[-1].stop:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)


def count(ranges: Iterable[range]) -> int:
    return sum(map(len, ranges))


def batches(ranges: Iterable[range]) -> Iterator[int]:
    for each in ranges:
        yield from each


def take(ranges: Sequence[range], number: int) -> tuple[Ranges, Ranges]:
    """The first `number` batches, and the others."""
    first, others = list[range](), list[range]()
    for each in ranges:
        here = min(len(each), number - count(first))
        first.append(each[:here])
        others.append(each[here:])
    return joined(first), joined(others)


@dataclass
class Leases:
    """Batches of a run of `total` batches: counted, leased, or free."""

    total: int
    counted: Ranges = ()
    """Batches in merged rounds."""
    held: dict[int, Ranges] = field(default_factory=dict)
    """Leased batches by replica."""

    @property
    def free(self) -> Ranges:
        """Batches that nobody has: returned ones, then those that were never leased."""
        taken = joined([*self.counted, *(each for ranges in self.held.values() for each in ranges)])
        edges = [0, *(edge for each in taken for edge in (each.start, each.stop)), self.total]
        return joined(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))

    @property
    def done(self) -> int:
        """Number of counted batches."""
        return count(self.counted)

    def lease(self, replica: int, number: int) -> Ranges:
        """Leases up to `number` batches; fewer, or none, at the end of the run. What the replica had is returned."""
        self.give_back(replica)
        leased, _ = take(self.free, number)
        if leased:
            self.held[replica] = leased
        return leased

    def give_back(self, replica: int) -> Ranges:
        """Frees what the replica has not done, and will not do."""
        return self.held.pop(replica, ())

    def close(self, done: dict[int, int]) -> dict[int, Ranges]:
        """A round is over: counts the first batches of each replica's lease, as many as it has done, and frees the
        others. Leases of replicas that are not named stay. Returns what was counted. Raises ValueError if a replica has
        done more than was leased."""
        counted: dict[int, Ranges] = {}
        for replica, number in done.items():
            if not 0 <= number <= count(self.held.get(replica, ())):
                raise ValueError(f"replica {replica} has done {number} batches of {count(self.held.get(replica, ()))}")
            counted[replica], _ = take(self.give_back(replica), number)
        self.counted = joined([*self.counted, *(each for ranges in counted.values() for each in ranges)])
        return counted
