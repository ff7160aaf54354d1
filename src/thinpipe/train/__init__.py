"""The training loop and what it needs: settings, the learning rate, the engine that computes, the console.

What needs torch is imported when it is first asked for: `thinpipe.train.config` alone must stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.train.config import (
    BasisSection,
    CheckpointSection,
    DataSection,
    JobSection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    RunConfig,
    SchedulerSection,
    TrainingSection,
    ValidationSection,
)

if TYPE_CHECKING:
    from thinpipe.train.loop import Trainer

__all__ = [
    "BasisSection",
    "CheckpointSection",
    "DataSection",
    "JobSection",
    "MetricsSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelismSection",
    "RunConfig",
    "SchedulerSection",
    "Trainer",
    "TrainingSection",
    "ValidationSection",
]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trainer = importlib.import_module(f"{__name__}.loop").Trainer
    globals()[name] = trainer
    return trainer
