"""Reads the config.json of a Hugging Face model that is to be trained as it is, and refuses what cannot be.

Code that comes with a model is never run: a model type must be transformers' own.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf.config import read_json_object
from thinpipe.models.hf.layer_plan import UnsupportedModelError

GLOBAL_NOISE: Mapping[str, str] = {
    "layerdrop": "skips whole layers at random",
    "layer_dropout": "skips whole layers at random",
    "router_jitter_noise": "adds noise to the routers of experts",
}
"""Settings that draw from the random numbers of the process, so that a result would depend on its other segments."""
_NOT_OF_LANGUAGE_MODELS = ("classifier_dropout", "summary_first_dropout")


def read_model(folder: str | Path, boundaries: tuple[int, ...] = ()) -> HuggingFaceModelConfig:
    """Configuration of the model in a folder with config.json. Raises UserError."""
    return describe(read_json_object(Path(folder) / "config.json"), str(folder), boundaries)


def find_config(name: str) -> dict[str, Any]:
    """Content of config.json of a folder, or of a model of the Hugging Face hub by its name; without a download if
    HF_HUB_OFFLINE is set, or if the hub's cache on this machine has it. Raises UserError."""
    if Path(name).is_dir():
        return read_json_object(Path(name) / "config.json")
    try:
        stored, _ = transformers.PreTrainedConfig.get_config_dict(name, local_files_only=_is_offline())
    except (OSError, ValueError) as error:
        hint = " (HF_HUB_OFFLINE is set: nothing is downloaded)" if _is_offline() else ""
        raise UserError(
            f"{name} is neither a folder with config.json nor a model that was found{hint}: {_first_line(error)}"
        ) from error
    if not stored.get("model_type"):
        raise UserError(f"there is no config.json with a model_type for {name}: give a folder that has one")
    return dict(stored)


def describe(stored: Mapping[str, Any], source: str, boundaries: tuple[int, ...] = ()) -> HuggingFaceModelConfig:
    """Configuration of a model from the content of its config.json. Raises UserError."""
    config = transformers_config(stored)
    return HuggingFaceModelConfig(
        source=source,
        stored=dict(stored),
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        boundaries=boundaries,
        max_seq_len=getattr(config, "max_position_embeddings", None),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def transformers_config(stored: Mapping[str, Any]) -> Any:
    """transformers' configuration object of a config.json. Raises UnsupportedModelError."""
    model_type = stored.get("model_type", "")
    if model_type not in transformers.CONFIG_MAPPING:
        own_code = "; code that comes with a model is not run" if "auto_map" in stored else ""
        raise UnsupportedModelError(
            f"model type {model_type!r} is not one of transformers {transformers.__version__}{own_code}"
        )
    if stored.get("quantization_config"):
        raise UnsupportedModelError(
            "these weights are already quantised (quantization_config): use the model's own folder in bf16"
        )
    if (asked := next(_kernels_of_hubs(stored), None)) is not None:
        raise UnsupportedModelError(f"config.json asks for a kernel from a hub ({asked}), which is code: remove it")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(stored))
    except Exception as error:  # transformers validates configurations with exceptions of many kinds
        raise UnsupportedModelError(f"transformers does not take this config.json: {_first_line(error)}") from error
    _refuse(config)
    return config


def attention_heads(model: HuggingFaceModelConfig) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and numbers in a head; of a model without attention one head of the whole
    width."""
    stored = transformers_config(model.stored)
    heads = getattr(stored, "num_attention_heads", None) or 1
    keys = getattr(stored, "num_key_value_heads", None) or heads
    return heads, keys, getattr(stored, "head_dim", None) or max(1, model.dim // heads)


def _kernels_of_hubs(stored: Mapping[str, Any]) -> Iterator[str]:
    """Settings, those of parts included, that name an implementation by a repository; transformers' own have a word."""
    for name, value in stored.items():
        if "implementation" in str(name) and "/" in str(value):
            yield str(name)
        elif isinstance(value, dict):
            yield from _kernels_of_hubs(value)


def _refuse(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} has an encoder: only decoder-only models are cut into segments"
        )
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{config.model_type} wraps a language model with vision or audio: use its text model's own folder"
        )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "output_router_logits adds a loss over the routers of all layers, which no segment has together: set it to "
            "false in config.json"
        )
    for name, what in GLOBAL_NOISE.items():
        if getattr(config, name, 0):
            raise UnsupportedModelError(f"{name} {what}: set it to 0 in config.json")


def dropout_rates(stored: Mapping[str, Any]) -> dict[str, float]:
    """Rates of dropout above 0 by their names in config.json, transformers' defaults included."""
    values = transformers_config(stored).to_dict()
    return {
        name: float(value)
        for name, value in values.items()
        if "drop" in name and name not in _NOT_OF_LANGUAGE_MODELS and isinstance(value, float) and value > 0
    }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def config_text(stored: Mapping[str, Any]) -> str:
    """config.json as a canonical text, by which equal configurations are recognised."""
    return json.dumps(stored, sort_keys=True, default=str)
