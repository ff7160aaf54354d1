"""Schedules by name: torch's own. Adding one is a line here and one in `pipeline/placement.py`."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from thinpipe.pipeline.stage import EarlyForwards1F1B

SCHEDULES: dict[str, Callable[..., Any]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": EarlyForwards1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
