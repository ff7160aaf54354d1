"""What a hub's run tells of who computes, comes and goes, in its event log."""

import msgspec
import pytest

from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, ask_next, begin_generation, next_request, running_hub
from thinpipe.core.events import Skipped, read_events
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, HubEvent, PeerJoined, PeerLeft
from thinpipe.swarm.protocol.messages import EventReport, LeaveReply, LeaveRequest

pytestmark = pytest.mark.timeout(200)


def told(config):
    return list(read_events(config.job.dump_folder / "events.jsonl"))


def test_who_comes_computes_and_goes_is_in_the_log(run_config):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        assembled = told(run_config)[-1]
        assert isinstance(assembled, GenerationStarted)
        assert (assembled.generation, assembled.step) == (1, 0)
        assert sorted(segment for peer in assembled.peers for segment in peer.segments) == [0, 1, 2]
        place = next(peer for peer in assembled.peers if peer.name == "p0")
        assert (place.device, place.flops, place.memory_nbytes) == ("cpu", 1e9, 1 << 40)
        assert (place.up_bps, place.down_bps, place.latency_s) == (1e9, 1e9, 0.01)
        ask_as(second, "leave", LeaveRequest(incarnation="a"), LeaveReply)
        with running.connection("p0", incarnation="b") as again:
            again.submit("next", next_request(running, incarnation="b"), seconds=20)
            wait_until(lambda: isinstance(told(run_config)[-1], PeerJoined), seconds=120)
            events = told(run_config)
    who = [(type(event), getattr(event, "peer", None)) for event in events if isinstance(event, HubEvent)]
    assert sorted(who[:2], key=str) == [(PeerJoined, "p0"), (PeerJoined, "p1")]
    assert who[2:] == [
        (GenerationStarted, None),
        (PeerLeft, "p1"),
        (GenerationEnded, "p1"),
        (PeerLeft, "p0"),
        (PeerJoined, "p0"),
    ]
    gone = [event for event in events if isinstance(event, PeerLeft)]
    assert [(event.cause, event.reason) for event in gone] == [("left", "p1 left"), ("restarted", "p0 was restarted")]
    (ended,) = [event for event in events if isinstance(event, GenerationEnded)]
    assert (ended.generation, ended.step, ended.cause) == (1, 0, "left")
    assert "p1 left: regrouping from step 0" in running.printed
    assert "p1 left" not in running.printed, "it is said once"


def test_a_peer_cannot_tell_what_only_the_hub_knows(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        assert ask_next(connection, running).generation == 1
        for event in (
            PeerLeft(step=0, peer="p0", cause="left", reason="a lie"),
            Skipped(step=1, loss=None, culprit="loss"),
        ):
            connection.publish(
                "event", msgspec.msgpack.encode(EventReport(generation=1, event=msgspec.json.encode(event)))
            )
        wait_until(lambda: isinstance(told(run_config)[-1], Skipped), seconds=120)
        assert "a lie" not in str(told(run_config))
