"""Base of all events of a run (`core.events`)."""

import time

import msgspec

from thinpipe.core.bounds import Clock


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time_s: Clock = msgspec.field(default_factory=time.time)
    """Wall-clock time of the event, in seconds since 1970. Not for durations, which have fields of their own, measured
    with a monotonic clock."""
