"""Validates training events reported by the first peer of a generation before they enter the hub's event log.

Checks that values are well-formed and plausible; whether a reported loss is true cannot be checked here.
"""

import math
import time

import msgspec

from thinpipe.core.events import Step, TrainingEvent
from thinpipe.swarm.protocol.decoding import decode_or_none

_MAX_NBYTES = 256 << 10
_MAX_LOSS, _MAX_STEP = 1e6, 1 << 53
_EVENTS: msgspec.json.Decoder[TrainingEvent] = msgspec.json.Decoder(TrainingEvent)


def validated_event(data: bytes) -> TrainingEvent | None:
    """The decoded event with the hub's time; None if it is invalid. The peer's clock is not trusted."""
    if len(data) > _MAX_NBYTES or b"\\u00" in data:  # JSON escapes of terminal control characters
        return None
    event = decode_or_none(_EVENTS, data)
    if event is None or not 0 <= event.step <= _MAX_STEP or (isinstance(event, Step) and not _is_plausible(event)):
        return None
    return msgspec.structs.replace(event, time_s=time.time())


def _is_plausible(step: Step) -> bool:
    """True if all counts are positive and finite and the loss is in range."""
    counted = (step.step, step.tokens, step.seconds, step.tokens_per_second)  # reports divide by these
    return all(0 < number < math.inf for number in counted) and abs(step.loss) <= _MAX_LOSS
