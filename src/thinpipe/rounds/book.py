"""The book of rounds: who has which batches, whose contribution is here, and when a round is over. Pure: `now` is in
seconds of a monotonic clock.

    open ── enough contributions are here ──> (closing) ── all are, or the grace is over ──> closed ── merged ──> open

A replica that is lost before its contribution is here returns its batches; afterwards its contribution counts. Whoever
is late is asked to contribute what it has before it uploads, not after. The book changes only by records, which the hub
makes durable; from those of a log it is the same again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from thinpipe.core.bounds import MAX_REPLICAS
from thinpipe.rounds.leases import Leases, Ranges, count, take
from thinpipe.rounds.records import (
    Closed,
    Contributed,
    Leased,
    MergedRound,
    Returned,
    RoundRecord,
    ranges_of,
    spans,
)

State = Literal["open", "closed"]


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """How long a round lasts."""

    steps: int
    """Steps of the fastest replica."""
    quorum: float = 0.5
    """Share of the replicas with a lease after whose contributions the others are asked to contribute."""
    grace_seconds: float = 60.0
    """Seconds that they then have."""


class RoundBook:
    """`total`: batches of the run. `records`: of the log so far; raises ValueError if they contradict each other."""

    def __init__(self, total: int, rules: RoundRules, records: Iterable[RoundRecord] = ()) -> None:
        self.leases, self.rules = Leases(total), rules
        self.round_number = 1
        self.state: State = "open"
        self.members: list[int] = []
        """Replicas that a closed round merges, in order."""
        self._leased: dict[int, Leased] = {}
        self._contributed: dict[int, Contributed] = {}
        self._deadline = math.inf
        """When a closing round is closed."""
        self.expected: set[int] = set()
        """Replicas that have a generation, and so are waited for though they may not have a lease yet."""
        for record in records:
            self.add(record)

    @property
    def contributions(self) -> Mapping[int, Contributed]:
        """Of this round, by replica."""
        return self._contributed

    @property
    def late(self) -> list[int]:
        """Replicas with a lease whose contribution is not here."""
        return [replica for replica in self._leased if replica not in self._contributed]

    @property
    def is_closing(self) -> bool:
        """True if enough contributions are here: no lease is given any more, and `late` are to contribute now."""
        waited_for = self._leased.keys() | self.expected
        return bool(self._contributed) and len(self._contributed) >= self.rules.quorum * len(waited_for)

    @property
    def unfinished(self) -> list[Leased]:
        """Leases without a contribution. When the hub begins, their generations are over."""
        return [self._leased[replica] for replica in self.late]

    @property
    def finished(self) -> bool:
        """True if every batch of the run is counted."""
        return self.leases.done == self.leases.total

    # What may be recorded next

    def lease(self, replica: int, generation: int, share: float = 1.0) -> Leased | None:
        """The lease of a generation of a replica in this round: the one it has, or a new one, which is to be added.
        `share`: its speed as a fraction of the fastest replica's. None: it has to wait for the next round, or there is
        nothing left."""
        known = self._leased.get(replica)
        if self.state == "closed" or replica in self._contributed or not replica < MAX_REPLICAS:
            return None
        if known is not None and known.generation >= generation:
            return known if known.generation == generation else None
        if self.is_closing:
            return None
        number = max(1, round(self.rules.steps * min(1.0, share)))
        batches, _ = take(self._free_for(replica), number)
        if not batches:
            return None
        return Leased(round=self.round_number, replica=replica, generation=generation, batches=spans(batches))

    def contribution(
        self, round_number: int, replica: int, generation: int, done: int, files: Mapping[str, str]
    ) -> Contributed:
        """A contribution that has arrived whole, to be added. Raises ValueError if it is of another round or too late,
        the generation has no such lease or has contributed, or has not done that many batches."""
        leased = self._leased.get(replica)
        if round_number != self.round_number or self.state == "closed" or replica in self._contributed:
            raise ValueError(f"replica {replica} cannot contribute to round {round_number} any more")
        if leased is None or leased.generation != generation:
            raise ValueError(f"generation {generation} of replica {replica} has no lease in round {self.round_number}")
        batches = ranges_of(leased.batches)
        if not 0 < done <= count(batches):
            raise ValueError(f"replica {replica} has done {done} of the {count(batches)} batches of its lease")
        first, _ = take(batches, done)
        return Contributed(
            round=self.round_number, replica=replica, generation=generation, batches=spans(first), files=dict(files)
        )

    def close(self, now: float) -> Closed | None:
        """What closes the round now, to be added; None: somebody is waited for."""
        if self.state == "closed" or not self.is_closing:
            return None
        self._deadline = min(self._deadline, now + self.rules.grace_seconds)
        if (self.late or self.expected - self._contributed.keys()) and now < self._deadline:
            return None
        return Closed(round=self.round_number, replicas=sorted(self._contributed))

    def give_up(self, replica: int, generation: int) -> Returned | None:
        """What returns the batches of a generation that is over, to be added; None: it has none, or its contribution is
        here."""
        leased = self._leased.get(replica)
        if leased is None or leased.generation != generation or replica in self._contributed:
            return None
        return Returned(round=self.round_number, replica=replica, generation=generation)

    # Changes

    def add(self, record: RoundRecord) -> None:
        """Raises ValueError if the record cannot follow those before it."""
        if record.round != self.round_number:
            raise ValueError(f"a record of round {record.round} in round {self.round_number}")
        match record:
            case Leased():
                self._add_lease(record)
            case Returned():
                if self.give_up(record.replica, record.generation) is None:
                    raise ValueError(
                        f"generation {record.generation} of replica {record.replica} has nothing to return"
                    )
                del self._leased[record.replica]
                self.leases.give_back(record.replica)
            case Contributed():
                self._add_contribution(record)
            case Closed():
                if self.state == "closed" or list(record.replicas) != sorted(self._contributed):
                    raise ValueError(f"round {record.round} cannot be closed with replicas {record.replicas}")
                self.state, self.members = "closed", list(record.replicas)
            case MergedRound():
                self._add_merge(record)

    def extend_deadlines(self, seconds: float) -> None:
        """The hub did not process messages in this time."""
        self._deadline += seconds

    def _add_lease(self, record: Leased) -> None:
        batches = ranges_of(record.batches)
        if self.state == "closed" or record.replica in self._contributed or not batches:
            raise ValueError(f"replica {record.replica} cannot have a lease in round {record.round} any more")
        free = self._free_for(record.replica)
        if not all(any(there.start <= each.start and each.stop <= there.stop for there in free) for each in batches):
            raise ValueError(f"batches {record.batches} of replica {record.replica} are not free")
        self.leases.held[record.replica] = batches
        self._leased[record.replica] = record

    def _add_contribution(self, record: Contributed) -> None:
        leased = self._leased.get(record.replica)
        is_late = self.state == "closed" or record.replica in self._contributed
        if is_late or leased is None or leased.generation != record.generation:
            raise ValueError(f"replica {record.replica} cannot contribute to round {record.round}")
        done = ranges_of(record.batches)
        if take(ranges_of(leased.batches), count(done))[0] != done or not done:
            raise ValueError(f"replica {record.replica} has not done the first batches of its lease")
        self._contributed[record.replica] = record

    def _add_merge(self, record: MergedRound) -> None:
        if self.state != "closed":
            raise ValueError(f"round {record.round} is merged before it is closed")
        done = {each: count(ranges_of(self._contributed[each].batches)) for each in self.members}
        if (finished := self.leases.done + sum(done.values())) != record.finished:
            raise ValueError(f"{finished} batches are counted by then, and not {record.finished}")
        for replica in self._leased.keys() - set(self.members):
            self.leases.give_back(replica)
        self.leases.close(done)
        self.round_number, self.state, self.members = self.round_number + 1, "open", []
        self._leased, self._contributed, self._deadline = {}, {}, math.inf

    def _free_for(self, replica: int) -> Ranges:
        """Free batches, and those that an earlier generation of this replica had."""
        without = Leases(self.leases.total, self.leases.counted, dict(self.leases.held))
        without.give_back(replica)
        return without.free
