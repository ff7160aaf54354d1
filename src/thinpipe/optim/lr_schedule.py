"""Learning-rate schedules as a pure function of the step, so that a resumed run needs no scheduler state."""

import math

from thinpipe.config.run import LRSchedulerConfig

DEFAULT_DECAY_RATIO = 0.2


def lr_factor(step: int, total_steps: int, schedule: LRSchedulerConfig) -> float:
    """Learning rate of a step (index from 0) as a fraction of the peak rate: 1 at the end of the warm-up."""
    warmup, lowest = schedule.warmup_steps, schedule.min_lr_factor
    if step < warmup:
        return (step + 1) / warmup
    if schedule.decay_type == "wsd":
        decay_steps = max(1, round(total_steps * (schedule.decay_ratio or DEFAULT_DECAY_RATIO)))
        start = max(warmup, total_steps - decay_steps)
    else:
        start = warmup
    if step < start:
        return 1.0
    progress = (step - start + 1) / (total_steps - start)
    if schedule.decay_type == "cosine":
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - lowest) * progress
