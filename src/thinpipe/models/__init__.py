"""Language models as (first, blocks, last), cut into segments. A block does not know how it is cut or compressed."""

from thinpipe.models.config import Execution, GPT2Config, LlamaConfig, ModelConfig, RopeScaling, SubspaceConfig
from thinpipe.models.materialise import materialise
from thinpipe.models.model import Model, Segment, build
from thinpipe.models.presets import PRESETS

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
