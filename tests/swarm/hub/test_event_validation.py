"""What the hub believes of a peer's word about the run."""

import time

import msgspec
import pytest

from tests.monitor.sample_events import started, step
from thinpipe.swarm.hub.event_validation import validated_event


def tell(event):
    return validated_event(msgspec.json.encode(event))


def test_the_time_is_the_hubs_own():
    for event in (step(1, time_s=-1e300), started(time_s=1e300)):
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
def test_what_cannot_be_a_step_is_dropped(field):
    assert tell(msgspec.structs.replace(step(1), **field)) is None


def test_other_nonsense_is_dropped():
    assert tell(started(step=-1)) is None
    assert tell(started(config="\x1b[2J")) is None
    assert tell(started(config="x" * 300_000)) is None
    assert validated_event(b"{") is None
