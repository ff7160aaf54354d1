"""Converts between Hugging Face's config.json and ModelConfig, for every family. No weights, and no torch.

The keys of a family are in its description (`config/families`). A setting that thinpipe's models do not support raises
a UserError that names it. Generation settings and the tokenizer are not part of a model configuration and are not read.
"""

import json
from pathlib import Path
from typing import Any

from thinpipe.config.families import FAMILIES
from thinpipe.config.huggingface_format import HFConfig, HuggingFaceFormat
from thinpipe.config.model import ModelConfig
from thinpipe.core.errors import UserError

CONFIG, SINGLE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
"""Files of a folder or of a model on a hub: the weights are in one file, or in those that the index names."""
PROJECTION_MODEL_TYPE = "thinpipe_projection"
"""model_type of folders written by `models.hf.projection`, which cannot be imported."""


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration of the model in a Hugging Face folder: dense and without boundaries. Raises UserError.

    Change `boundaries` or `tied` with `dataclasses.replace`; for Llama `max_seq_len` too (GPT-2 has a row for each
    position).
    """
    path = Path(folder) / CONFIG
    stored = read_json_object(path)
    try:
        if stored.get("model_type") == PROJECTION_MODEL_TYPE:
            raise UserError(
                "this is an export of a model with a boundary projection, which is not read back: to train on, set "
                "model.initial to "
                "the folder of the run that it came from"
            )
        family = FAMILIES.get(stored.get("model_type", ""))
        if family is None:
            raise UserError(f"model_type {stored.get('model_type')!r} is not supported, only {' and '.join(FAMILIES)}")
        described = family.spec.huggingface
        _refuse_unsupported(stored, described)
        read: dict[str, Any] = {field: key.read(stored) for field, key in described.keys.items()}
        return family(**read, **described.read_rest(stored))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def hf_config(config: ModelConfig, end_of_text_id: int | None = None) -> dict[str, Any]:
    """Content of config.json for a dense model, in a layout that transformers 4 and 5 both read."""
    described = config.spec.huggingface
    return {
        "architectures": [described.architecture],
        "model_type": config.family,
        **{key.name: getattr(config, field) for field, key in described.keys.items()},
        **{name: fixed.values[0] for name, fixed in described.fixed.items() if fixed.values[0] is not None},
        **described.write_rest(config),
        # Without these keys, transformers uses the original tokenizer's ids, which a small vocabulary may not have.
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
    }


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file whose content is an object. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a folder as `save_pretrained` or `hf download` write it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}: download it again")
    return content


def _refuse_unsupported(stored: HFConfig, described: HuggingFaceFormat) -> None:
    for name, fixed in described.fixed.items():
        if stored.get(name, fixed.values[0]) in fixed.values:
            continue
        remedy = "use a model trained that way" if fixed.logits_depend else "set it so, the logits do not depend on it"
        supported = " or ".join(json.dumps(value) for value in fixed.values)
        raise UserError(f"{name} = {json.dumps(stored[name])} is not supported, only {supported}: {remedy}")
