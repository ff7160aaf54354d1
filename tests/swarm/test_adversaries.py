"""Whatever one member says and contributes, no honest one loses its key, and the run goes on."""

from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.judged import CONTRIBUTED, INTERVAL, KINDS, SAID, Attack, World
from thinpipe.core.hub_events import PeerSuspended

GENERATIONS = 20
ATTACKS = st.lists(
    st.builds(Attack, kind=st.sampled_from(KINDS), after=st.integers(0, 7), whom=st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


def check(world, hostile):
    assert world.stopped == ""
    assert set(world.expelled) <= {hostile}
    assert world.committed >= 3 * INTERVAL, (world.committed, world.ends[-5:])


@settings(max_examples=40, deadline=None)
@given(members=st.integers(2, 6), hostile=st.integers(0, 5), most=st.integers(2, 6), attacks=ATTACKS)
def test_one_adversary_neither_removes_anybody_nor_stops_the_run(members, hostile, most, attacks):
    names = ["anna", "bert", "carl", "dora", "emil", "fred"][:members]
    name = names[hostile % members]
    world = World(names, {name: chain.from_iterable(repeat(attacks))}, most=most)
    world.run(GENERATIONS)
    check(world, name)


@pytest.mark.parametrize("members", range(2, 7))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "behaves"])
def test_who_does_one_thing_again_and_again_is_suspended(kind, members):
    names = ["anna", "bert", "carl", "dora", "emil", "fred"][:members]
    for name in (names[0], names[-1]):
        world = World(names, {name: repeat(Attack(kind, whom=0))})
        world.run(GENERATIONS)
        check(world, name)
        suspended = [event.peer for event in world.events if isinstance(event, PeerSuspended)]
        applies = {"loss": name == names[-1], "stops": False}.get(kind, True)
        assert not applies or name in suspended, (kind, suspended)


def test_every_kind_of_attack_is_tried():
    assert {*SAID, *CONTRIBUTED, "starts again", "behaves"} == set(KINDS)


@pytest.mark.parametrize("members", range(2, 7))
def test_a_run_that_has_diverged_stops_and_costs_nobody_its_key(members):
    world = World(["anna", "bert", "carl", "dora", "emil", "fred"][:members], {}, diverges_at=8, needed=2)
    world.run(GENERATIONS)
    assert world.stopped == "not_finite" or members == 2
    assert world.stopped
    assert world.expelled == []
    assert world.committed == INTERVAL
