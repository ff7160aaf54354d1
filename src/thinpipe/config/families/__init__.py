"""Model families by name. A new family is a file in this folder and a line in `FAMILIES`. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from thinpipe.config.families.gpt2 import GPT2Config
from thinpipe.config.families.llama import LlamaConfig
from thinpipe.config.model import ModelConfig
from thinpipe.core.errors import DECODE_ERRORS, UserError

FAMILIES: dict[str, type[ModelConfig]] = {
    "llama": LlamaConfig,
    "gpt2": GPT2Config,
}
PRESETS: dict[str, ModelConfig] = {
    name: preset for config in FAMILIES.values() for name, preset in config.presets().items()
}
"""Model configurations by name, such as "llama-tiny", which trains on a laptop's CPU."""


class _ManifestModel(msgspec.Struct):
    """Fields of a checkpoint's manifest that describe the model."""

    family: str
    model: dict[str, Any]


def model_of_manifest(family: str, model: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Model configuration from the fields `family` and `model` of a checkpoint's manifest. Raises UserError, which
    begins with `where`, for an unknown family."""
    if family not in FAMILIES:
        raise UserError(f"{where} holds a model of family {family!r}, known are {list(FAMILIES)}")
    return msgspec.convert(model, FAMILIES[family])


def read_model(manifest: Path) -> ModelConfig:
    """Model configuration from a checkpoint's manifest file. Raises UserError."""
    try:
        described = msgspec.json.decode(manifest.read_bytes(), type=_ManifestModel)
        return model_of_manifest(described.family, described.model, where=str(manifest))
    except DECODE_ERRORS as error:
        raise UserError(f"{manifest} describes no model that this thinpipe knows: {error}") from None
