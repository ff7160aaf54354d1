"""Who was told to do something outside of a generation and does not ask again."""

import pytest

from thinpipe.swarm.hub.liveness import PendingRequests
from thinpipe.swarm.protocol.messages import Finished, Measure, Refused, RestoreFiles, Standby

RESTORE = RestoreFiles(step=1, files={}, manifest="", text="")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Measure(concurrent=True), "measure its machine"),
        (RESTORE, "upload files that the hub has lost"),
        (Standby(text=""), "wait"),
    ],
)
def test_who_does_not_ask_again_is_late(answer, words):
    pending_requests = PendingRequests(10.0)
    pending_requests.add("a", answer, 0.0)
    assert not list(pending_requests.overdue(10.0))
    message = f"it sends heartbeats, but it was asked to {words} 11 s ago and has not answered within 10 s"
    assert list(pending_requests.overdue(11.0)) == [("a", message)]
    pending_requests.discard("a")
    assert not list(pending_requests.overdue(100.0))


def test_who_gives_piece_by_piece_may_take_as_long_as_it_likes():
    pending_requests = PendingRequests(10.0)
    pending_requests.add("a", RESTORE, 0.0)
    for now in range(0, 100, 9):
        pending_requests.on_progress("a", float(now))
        pending_requests.on_progress("b", float(now))
        assert not list(pending_requests.overdue(float(now)))
    assert [name for name, _ in pending_requests.overdue(200.0)] == ["a"]


@pytest.mark.parametrize("answer", [Finished(text=""), Refused(text="")])
def test_who_has_nothing_to_do_is_not_watched(answer):
    pending_requests = PendingRequests(10.0)
    pending_requests.add("a", Standby(text=""), 0.0)
    pending_requests.add("a", answer, 1.0)
    assert not list(pending_requests.overdue(100.0))


def test_a_hub_that_slept_blames_nobody():
    pending_requests = PendingRequests(10.0)
    pending_requests.add("a", Standby(text=""), 0.0)
    pending_requests.extend_deadlines(50.0)
    assert not list(pending_requests.overdue(60.0))
    assert list(pending_requests.overdue(61.0))
