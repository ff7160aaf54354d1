"""What the hub believes of a peer's word about the run."""

import time

import msgspec
import pytest

from tests.monitor.sample_events import started, step
from thinpipe.core.events import Skipped
from thinpipe.core.foreign import ProtocolError
from thinpipe.swarm.hub.event_validation import validated_event


def tell(event):
    return validated_event(msgspec.json.encode(event))


def test_the_time_is_the_hubs_own():
    for event in (step(1, time_s=0.0), started(time_s=1e11)):
        told = tell(event)
        assert abs(told.time_s - time.time()) < 86_400
        assert msgspec.structs.replace(told, time_s=event.time_s) == event


@pytest.mark.parametrize(
    "field",
    [
        {"step": 0}, {"step": -3}, {"seconds": 0.0}, {"seconds": -1.0}, {"tokens": 0}, {"tokens_per_second": 0.0},
        {"loss": 1e7}, {"loss": -1e7}, {"loss": float("nan")}, {"seconds": float("inf")},
    ],
)  # fmt: skip
def test_what_cannot_be_a_step_is_refused(field):
    with pytest.raises(ProtocolError):
        tell(msgspec.structs.replace(step(1), **field))


@pytest.mark.parametrize("field", [{"step": -1}, {"config": "\x1b[2J"}, {"config": "x" * 300_000}, {"time_s": -1e300}])
def test_other_nonsense_is_refused(field):
    with pytest.raises(ProtocolError):
        tell(started(**field))


def test_what_is_no_event_is_refused():
    with pytest.raises(ProtocolError):
        validated_event(b"{")


def test_texts_for_people_are_made_plain():
    assert tell(Skipped(step=1, loss=None, culprit="a\x1b[2Jb")).culprit == "a [2Jb"
