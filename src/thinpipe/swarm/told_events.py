"""What the first peer of an epoch tells of the run, as far as it can be believed: it goes into the hub's log, which
reports and pages read. Whether a loss is true nobody here can say; only whether it is one."""

import math
import time

import msgspec

from thinpipe.core.events import Step, TrainingEvent
from thinpipe.swarm.reading import read

_MOST_NBYTES = 256 << 10
_MOST_LOSS, _MOST_STEP = 1e6, 1 << 53
_EVENTS: msgspec.json.Decoder[TrainingEvent] = msgspec.json.Decoder(TrainingEvent)


def read_told(data: bytes) -> TrainingEvent | None:
    """None where it cannot be an event. The time is the hub's: the clock of a peer may say anything."""
    if len(data) > _MOST_NBYTES or b"\\u00" in data:  # so JSON writes what could move a cursor
        return None
    event = read(_EVENTS, data)
    if event is None or not 0 <= event.step <= _MOST_STEP or (isinstance(event, Step) and not _can_be(event)):
        return None
    return msgspec.structs.replace(event, time_s=time.time())


def _can_be(step: Step) -> bool:
    counted = (step.step, step.tokens, step.seconds, step.tokens_per_second)  # others divide by them
    return all(0 < number < math.inf for number in counted) and abs(step.loss) <= _MOST_LOSS
