"""Whatever the network, the peers and the hub do: one commit of a step, generations only grow, what is committed is
what an undisturbed run has and has two holders, and nobody but the peers of a generation has influence on it.

PROTOCOL_STEPS=100000 runs as many steps as it says, and prints how long that took.
"""

import os
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.swarm.simulated import INTERVAL, NAMES, World

STEPS = int(os.environ.get("PROTOCOL_STEPS", "4000"))
SHRINK = "PROTOCOL_SHRINK" in os.environ
"""To look for the shortest way to a failure, which takes minutes."""
EXAMPLES, STEPS_OF_ONE = 40, 100
MAX_IN_FLIGHT, MAX_PROCESSES = 60, 6

done = {"steps": 0, "commits": 0, "generations": 0, "most": 0}

some = st.integers(0, 63)
names = st.sampled_from(NAMES)


class Protocol(RuleBasedStateMachine):
    """Numbers choose among processes or messages under way, whatever there are."""

    def __init__(self):
        super().__init__()
        self.world = World()
        for name in NAMES[:3]:
            self.world.start(name)
        self.log, self.generation = [], 0

    @initialize(seconds=st.integers(0, 30))
    def before_anything_goes_wrong(self, seconds):
        self.all_is_well(seconds)

    def one(self, number):
        return self.world.processes[number % len(self.world.processes)] if self.world.processes else None

    def message(self, number):
        """Old ones come up as often as new ones: they overtake each other."""
        return number % len(self.world.in_flight) if self.world.in_flight else None

    @rule(number=some)
    def act(self, number):
        if (process := self.one(number)) is not None and len(self.world.in_flight) < MAX_IN_FLIGHT:
            process.act()

    @rule(number=some)
    def send_what_was_saved(self, number):
        if (process := self.one(number)) is not None and len(self.world.in_flight) < MAX_IN_FLIGHT:
            process.act_uploader()

    @rule(number=some)
    def deliver(self, number):
        if (index := self.message(number)) is not None:
            self.world.deliver(index)

    @rule(numbers=st.lists(some, min_size=1, max_size=12))
    def deliver_some(self, numbers):
        for number in numbers:
            self.deliver(number)

    @rule(number=some)
    def drop(self, number):
        if (index := self.message(number)) is not None:
            self.world.in_flight.pop(index)

    @rule(number=some)
    def duplicate(self, number):
        if (index := self.message(number)) is not None and len(self.world.in_flight) < MAX_IN_FLIGHT:
            self.world.in_flight.append(self.world.in_flight[index])

    @rule(number=some)
    def damage(self, number):
        """A file on its way."""
        if (index := self.message(number)) is not None:
            process, kind, request, to_hub, contents = self.world.in_flight[index]
            if kind == "keep" and to_hub:
                changed = (contents[0], contents[1], (*contents[2], -1))
                self.world.in_flight[index] = process, kind, request, to_hub, changed

    @rule(number=some)
    def a_fault_in_a_step(self, number):
        if (process := self.one(number)) is not None:
            process.faulty = True

    @rule(number=some)
    def a_wrong_description(self, number):
        if (process := self.one(number)) is not None:
            process.lies = True

    @rule(number=some)
    def crash(self, number):
        if (process := self.one(number)) is not None:
            self.world.processes.remove(process)

    @rule(name=names)
    def start(self, name):
        """Also beside one that is stuck."""
        if len(self.world.processes) < MAX_PROCESSES:
            self.world.start(name)

    @rule(name=names)
    def lose(self, name):
        """Nothing was heard of it, be it alive or not."""
        self.world.hub.drop_peer(name)

    @rule(rotten=st.booleans())
    def hub_crashes(self, rotten):
        self.world.restart_hub(rotten=rotten)

    @rule()
    def hub_crashes_at_its_next_commit(self):
        self.world.hub.crash_between = True

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0, 2000.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    @rule(seconds=st.integers(1, 20))
    def all_is_well(self, seconds):
        for _ in range(seconds):
            self.world.calm()

    @rule(numbers=st.lists(some, max_size=20), rounds=st.integers(1, 8))
    def all_act_and_some_of_it_arrives(self, numbers, rounds):
        """In any order, much of it late."""
        for _ in range(rounds):
            for process in self.world.processes:
                process.act()
                process.act_uploader()
            for number in numbers:
                self.deliver(number)
            del self.world.in_flight[:-MAX_IN_FLIGHT]

    @invariant()
    def count(self):
        done["steps"] += 1

    @invariant()
    def what_is_committed_stays_so(self):
        log = self.world.disk.log
        assert log[: len(self.log)] == self.log
        assert len({commit.step for commit in log}) == len(log)
        self.log = list(log)

    @invariant()
    def generations_only_grow(self):
        assert self.world.disk.generation >= max(self.generation, self.world.hub.membership.last_generation)
        self.generation = self.world.disk.generation

    @invariant()
    def what_is_sent_can_become_whole(self):
        self.world.check_pending()

    def teardown(self):
        """When all is well again, the run goes on."""
        world = self.world
        world.hub.crash_between = False
        for process in world.processes:
            process.faulty = process.lies = False
        for name in NAMES:
            if not any(process.name == name for process in world.processes):
                world.start(name)
        before = max(world.disk.folders)
        for _ in range(200):
            world.calm()
            if max(world.disk.folders) >= before + 2 * INTERVAL:
                break
        else:
            pytest.fail(f"the run does not go on although all is well: {world.in_words()}")
        done["commits"] += len(world.disk.log)
        done["generations"] += world.disk.generation
        done["most"] = max(done["most"], world.disk.log[-1].step)


@pytest.mark.timeout(3600)
def test_whatever_happens_nothing_is_lost_doubled_or_changed():
    done.update(dict.fromkeys(done, 0))
    began = time.monotonic()
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    wanted = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS_OF_ONE,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
        suppress_health_check=checks,
    )
    while done["steps"] < STEPS:
        run_state_machine_as_test(Protocol, settings=wanted)
    print(f"{done} in {time.monotonic() - began:.1f} s")
    assert done["commits"] > done["steps"] // 200, "too little happens for this to mean anything"
