"""Language models as (first, blocks, last), cut into segments. Blocks are independent of cuts and compression.

Names that need torch are imported lazily, so that importing the configurations alone stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.config.families import PRESETS
from thinpipe.config.families.gpt2 import GPT2Config
from thinpipe.config.families.llama import LlamaConfig
from thinpipe.config.model import ExecutionConfig, ModelConfig, RopeScaling, SubspaceConfig

if TYPE_CHECKING:
    from thinpipe.models.init_weights import materialise
    from thinpipe.models.model import Model, Segment, build

__all__ = [
    "PRESETS",
    "ExecutionConfig",
    "GPT2Config",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Segment",
    "SubspaceConfig",
    "build",
    "materialise",
]

_NEEDS_TORCH = {"Model": "model", "Segment": "model", "build": "model", "materialise": "init_weights"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    globals()[name] = value
    return value
