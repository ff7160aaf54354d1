"""Validates training events reported by the first peer of a generation before they enter the hub's event log.

Checks that values are well-formed and plausible; whether a reported loss is true cannot be checked here.
"""

import time

import msgspec

from thinpipe.core.events import Step, TrainingEvent
from thinpipe.core.foreign import ProtocolError, decode_foreign

_MAX_LOSS = 1e6
_SECONDS = 1e-6, 1e6
"""Shortest and longest step that is believed, in seconds."""


def validated_event(data: bytes) -> TrainingEvent:
    """The decoded event with the hub's time: the peer's clock is not trusted. Raises ProtocolError if it is invalid."""
    event: TrainingEvent = decode_foreign(data, TrainingEvent, form="json")
    if isinstance(event, Step) and not _is_plausible(event):
        raise ProtocolError("a step that cannot be")
    return msgspec.structs.replace(event, time_s=time.time())


def _is_plausible(step: Step) -> bool:
    """True if nothing that reports divide by is 0 or nearly 0, and the loss is in range."""
    shortest, longest = _SECONDS
    return (
        step.step > 0
        and step.tokens > 0
        and shortest <= step.seconds <= longest
        and step.tokens_per_second >= 1 / longest
        and abs(step.loss) <= _MAX_LOSS
    )
