"""Compares this machine's clock with the hub's. Nothing that a peer may do depends on its clock; a wrong one is
reported."""

import time

from thinpipe.core.units import format_duration

CLOCK_SECONDS = 60.0
"""Difference from which a clock counts as wrong."""
CLOCK_FIX = (
    "Turn on network time (NTP) on the machine whose clock is wrong: training works, but times in logs are wrong."
)


def clock_text(apart: float) -> str:
    """A difference of clocks in words; `apart`: seconds by which this machine's is ahead."""
    difference = format_duration(abs(apart)) if abs(apart) >= CLOCK_SECONDS else f"{abs(apart):.1f} s"
    return f"{difference} {'ahead of' if apart > 0 else 'behind'} the hub's clock"


def wrong_clock_text(hub_s: float) -> str:
    """What to say of this machine's clock, now that the hub's says `hub_s`; empty if they agree or the hub said
    nothing."""
    apart = time.time() - hub_s
    if not hub_s or abs(apart) <= CLOCK_SECONDS:
        return ""
    return f"this machine's clock is {clock_text(apart)}, so one of the two is wrong"
