"""The book of rounds: whatever happens, every batch is counted once, and the log tells it all again."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from thinpipe.rounds.book import RoundBook, RoundRules
from thinpipe.rounds.leases import batches
from thinpipe.rounds.records import Closed, Leased, MergedRound, RoundRecord, ranges_of

RULES = RoundRules(steps=4, quorum=0.5, grace_seconds=10.0)
FILES = {"first.safetensors": "0" * 64}


def begin(book, replica, generation, share=1.0):
    leased = book.lease(replica, generation, share)
    book.add(leased)
    return leased


def contribute(book, replica, generation, done=None):
    leased = book.lease(replica, generation)
    number = len([*batches(ranges_of(leased.batches))]) if done is None else done
    book.add(book.contribution(book.round_number, replica, generation, number, FILES))


def merge(book):
    counted = sum(len([*batches(ranges_of(book.contributions[each].batches))]) for each in book.members)
    book.add(MergedRound(round=book.round_number, finished=book.leases.done + counted, update=FILES, weights=FILES))


def test_a_round_of_two_replicas():
    book = RoundBook(100, RULES)
    assert begin(book, 0, 1).batches == [(0, 4)]
    assert begin(book, 1, 2).batches == [(4, 8)]
    assert book.close(0.0) is None, "nothing is here"
    contribute(book, 0, 1)
    assert book.close(0.0) is None
    assert (book.is_closing, book.late) == (True, [1])
    contribute(book, 1, 2)
    closed = book.close(0.0)
    assert closed.replicas == [0, 1]
    book.add(closed)
    merge(book)
    assert (book.round_number, book.state, book.leases.done) == (2, "open", 8)
    assert begin(book, 1, 2).batches == [(8, 12)]


def test_a_slow_replica_gets_fewer_steps_and_is_told_to_contribute_what_it_has():
    book = RoundBook(100, RULES)
    begin(book, 0, 1)
    assert begin(book, 1, 2, share=0.5).batches == [(4, 6)]
    contribute(book, 0, 1)
    book.close(0.0)
    contribute(book, 1, 2, done=1)
    book.add(book.close(1.0))
    merge(book)
    assert book.leases.done == 5
    assert begin(book, 0, 1).batches == [(5, 9)], "what was not done comes first"


def test_nobody_waits_longer_than_the_grace_and_the_late_one_returns_its_batches():
    book = RoundBook(100, RULES)
    begin(book, 0, 1)
    begin(book, 1, 2)
    contribute(book, 1, 2)
    assert book.close(5.0) is None
    assert book.lease(2, 3) is None, "who comes now waits for the next round"
    assert book.close(14.9) is None
    book.extend_deadlines(5.0)
    assert book.close(15.1) is None, "the hub stood still"
    closed = book.close(20.1)
    assert closed.replicas == [1]
    book.add(closed)
    with pytest.raises(ValueError, match="cannot contribute"):
        book.contribution(1, 0, 1, 4, FILES)
    merge(book)
    assert begin(book, 0, 1).batches == [(0, 4)]


def test_a_contribution_counts_when_its_replica_is_lost_and_a_lease_does_not():
    book = RoundBook(100, RULES)
    for replica in range(2):
        begin(book, replica, replica + 1)
    book.expected = {0, 1, 2}
    contribute(book, 0, 1)
    assert book.give_up(0, 1) is None
    book.add(book.give_up(1, 2))
    assert begin(book, 1, 3).batches == [(4, 8)]
    assert book.give_up(1, 2) is None, "the end of an earlier generation does not touch the present one"
    book.add(book.give_up(1, 3))
    book.expected = set()
    assert book.close(0.0).replicas == [0]


def test_a_lease_is_the_same_when_it_is_asked_for_again():
    book = RoundBook(100, RULES)
    leased = begin(book, 0, 1)
    assert book.lease(0, 1) is leased
    assert book.lease(0, 2).batches == leased.batches, "a new generation of the replica takes over its batches"


@pytest.mark.parametrize("done", [0, 5, -1])
def test_what_was_not_leased_cannot_be_contributed(done):
    book = RoundBook(100, RULES)
    begin(book, 0, 1)
    for replica, generation in ((0, 2), (1, 1)):
        with pytest.raises(ValueError, match="has no lease"):
            book.contribution(1, replica, generation, 1, FILES)
    with pytest.raises(ValueError, match="has done"):
        book.contribution(1, 0, 1, done, FILES)


@pytest.mark.parametrize(
    "record",
    [
        Leased(round=2, replica=0, generation=1, batches=[(0, 4)]),
        Leased(round=1, replica=1, generation=2, batches=[(2, 6)]),
        Leased(round=1, replica=1, generation=2, batches=[(90, 200)]),
        Closed(round=1, replicas=[0]),
        MergedRound(round=1, finished=4, update={}, weights={}),
    ],
)
def test_records_that_contradict_the_log_are_refused(record):
    book = RoundBook(100, RULES)
    begin(book, 0, 1)
    with pytest.raises(ValueError, match=r"replica|round|batches"):
        book.add(record)


def test_the_run_ends_when_every_batch_is_counted():
    book = RoundBook(5, RULES)
    begin(book, 0, 1)
    assert begin(book, 1, 2).batches == [(4, 5)]
    assert book.lease(2, 3) is None
    for replica in range(2):
        contribute(book, replica, replica + 1)
    book.add(book.close(0.0))
    merge(book)
    assert book.finished
    assert book.lease(0, 1) is None


def test_whoever_has_contributed_waits_and_can_neither_repeat_nor_change_it():
    book = RoundBook(100, RULES)
    begin(book, 0, 1)
    begin(book, 1, 2)
    contribute(book, 0, 1)
    assert book.lease(0, 1) is None
    with pytest.raises(ValueError, match="cannot contribute"):
        book.contribution(1, 0, 1, 4, FILES)
    contribute(book, 1, 2)
    book.add(book.close(0.0))
    merge(book)
    begin(book, 0, 1)
    with pytest.raises(ValueError, match="cannot contribute"):
        book.contribution(1, 0, 1, 4, FILES)


def test_replicas_that_are_still_downloading_are_waited_for():
    book = RoundBook(100, RULES)
    book.expected = {0, 1, 2}
    begin(book, 0, 1, share=0.1)
    contribute(book, 0, 1)
    assert book.close(0.0) is None
    assert not book.is_closing
    begin(book, 1, 2)
    contribute(book, 1, 2)
    assert book.close(0.0) is None
    assert book.is_closing
    assert book.close(10.0).replicas == [0, 1]


class AnyRun(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.book, self.log, self.counted = RoundBook(60, RULES), [], []
        self.generation, self.running, self.now = 0, {}, 0.0

    def record(self, record):
        self.log.append(msgspec.json.decode(msgspec.json.encode(record), type=RoundRecord))
        self.book.add(record)

    @rule(replica=st.integers(0, 3), share=st.floats(0.1, 1.0))
    def lease(self, replica, share):
        if replica not in self.running:
            self.generation += 1
            self.running[replica] = self.generation
        found = self.book.lease(replica, self.running[replica], share)
        if found is not None and found not in self.log:
            self.record(found)

    @rule(replica=st.integers(0, 3), done=st.integers(1, 4))
    def contribute(self, replica, done):
        if replica in self.book.late and self.book.state != "closed" and replica in self.running:
            leased = self.book.lease(replica, self.running[replica])
            if leased is not None and leased in self.log:
                most = sum(stop - start for start, stop in leased.batches)
                round_number = self.book.round_number
                contributed = self.book.contribution(
                    round_number, replica, self.running[replica], min(done, most), FILES
                )
                self.record(contributed)

    @rule(replica=st.integers(0, 3))
    def lose(self, replica):
        if replica in self.running:
            returned = self.book.give_up(replica, self.running.pop(replica))
            if returned is not None:
                self.record(returned)

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds):
        self.now += seconds
        closed = self.book.close(self.now)
        if closed is not None:
            self.record(closed)

    @rule()
    def merge(self):
        if self.book.state == "closed":
            for replica in self.book.members:
                self.counted += batches(ranges_of(self.book.contributions[replica].batches))
            finished = len(self.counted)
            self.record(MergedRound(round=self.book.round_number, finished=finished, update=FILES, weights=FILES))

    @rule()
    def the_keeper_starts_again(self):
        """Generations end with it; contributions stay."""
        self.book, self.running = RoundBook(60, RULES, self.log), {}
        for leased in self.book.unfinished:
            self.record(self.book.give_up(leased.replica, leased.generation))

    @invariant()
    def every_batch_is_counted_once(self):
        assert sorted(self.counted) == [*batches(self.book.leases.counted)]
        held = [each for ranges in self.book.leases.held.values() for each in batches(ranges)]
        assert sorted(self.counted + held + [*batches(self.book.leases.free)]) == [*range(60)]


AnyRun.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_whatever_happens_every_batch_is_counted_once = AnyRun.TestCase
