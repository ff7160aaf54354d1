"""A member that computes, and lies in the sums of the steps: the hub sees who contributed what."""

import pytest

from tests.programs import events_of
from tests.swarm.hostile.test_accusations import PATIENT
from thinpipe.core.events import Stopped
from thinpipe.core.hub_events import GenerationStarted, PeerLeft, PeerSuspended

NAMES = ("anna", "bert", "mallory")


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ("not_finite", "three steps in a row from step 1 were skipped (first in the part of mallory: "),
        ("foreign", "mallory contributes numbers of other peers to the vector of a step"),
        pytest.param("finds", "mallory says that ", marks=pytest.mark.long),
        pytest.param("other_basis", "mallory has another basis or other fixed tables than ", marks=pytest.mark.long),
        pytest.param("no_length", "mallory announces bytes below 0 or more than the ", marks=pytest.mark.long),
    ],
)
def test_who_lies_in_the_sums_is_suspended_and_the_run_goes_on(
    lie, says, run_config, start_hub, join, programs, tmp_path
):
    hub, invites = start_hub(3, *PATIENT)
    peers = [join(invite, name) for invite, name in zip(invites, NAMES[:2], strict=False)]
    programs(
        "mallory",
        *("join", invites[2], "--folder", tmp_path / "mallory", "--name", "mallory"),
        module="tests.swarm.hostile.liar",
        environment={"LIE": lie},
    )
    hub.until("mallory is suspended for 5 min: ")
    hub.until(r"step: +10 ")
    suspended = [event for event in events_of(run_config, PeerSuspended) if event.peer == "mallory"]
    assert says in suspended[0].reason, suspended
    assert [peer.process.poll() for peer in peers] == [None, None]
    assert hub.process.poll() is None
    assert events_of(run_config, Stopped) == []
    assert "accused" not in [event.cause for event in events_of(run_config, PeerLeft)]
    *_, last = events_of(run_config, GenerationStarted)
    assert sorted(peer.name for peer in last.peers) == ["anna", "bert"]
