"""Language models as (first, blocks, last), cut into segments. A block does not know how it is cut or compressed.

What needs torch is imported when it is first asked for: `thinpipe.models.config` alone must stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.models.config import Execution, GPT2Config, LlamaConfig, ModelConfig, RopeScaling, SubspaceConfig
from thinpipe.models.presets import PRESETS

if TYPE_CHECKING:
    from thinpipe.models.initial import materialise
    from thinpipe.models.model import Model, Segment, build

__all__ = [
    "PRESETS",
    "Execution",
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

_NEEDS_TORCH = {"Model": "model", "Segment": "model", "build": "model", "materialise": "initial"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    globals()[name] = value
    return value
