"""Training loop of one process: trainer, step engine, data loading, launcher, console output.

`Trainer` is imported lazily because it imports torch; the settings classes below import no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelSettings,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)

if TYPE_CHECKING:
    from thinpipe.training.trainer import Trainer

__all__ = [
    "BasisConfig",
    "CheckpointConfig",
    "DataConfig",
    "JobConfig",
    "LRSchedulerConfig",
    "MetricsConfig",
    "ModelSettings",
    "OptimizerConfig",
    "ParallelismConfig",
    "RunConfig",
    "Trainer",
    "TrainingConfig",
    "ValidationConfig",
]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trainer = importlib.import_module(f"{__name__}.trainer").Trainer
    globals()[name] = trainer
    return trainer
