"""Settings of a run as the API takes them: a file, a preset or a RunConfig, with sections overridden. No torch."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from thinpipe.config.boundary import refuse_registered_name
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.presets import settings_file
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table, load_toml, refuse_unknown_keys
from thinpipe.core.errors import UserError


def run_settings(config: RunConfig | Path | str, overrides: Mapping[str, Any]) -> RunConfig:
    """`config`: settings, the path of a run file, or "preset:NAME". `overrides`, by section: a dictionary of the keys
    to change (`{"steps": 100}`), or a settings object that replaces the section. Warns of fewer steps than the warm-up
    has, and shortens it. Raises UserError."""
    settings = config if isinstance(config, RunConfig) else load_toml(settings_file(str(config)), RunConfig)
    refuse_unknown_keys({section: {} for section in overrides}, RunConfig, where="overrides")
    sections = {section: _changed(section, getattr(settings, section), overrides[section]) for section in overrides}
    if "training" in sections and "lr_scheduler" not in sections:
        shorter = settings.lr_scheduler.warmup_within(sections["training"].steps)
        if shorter is not None:
            fewer, sentence = shorter
            warnings.warn(sentence, stacklevel=3)
            sections["lr_scheduler"] = replace(settings.lr_scheduler, warmup_steps=fewer)
    return replace(settings, **sections)


def _changed(section: str, current: Any, changes: Any) -> Any:
    if section == "lora":
        current = current or LoraConfig()
    if isinstance(changes, type(current)):
        return changes
    if not isinstance(changes, Mapping):
        given = "None" if changes is None else f"a {type(changes).__name__}"
        raise UserError(
            f"overrides of [{section}]: write a dictionary of the keys to change, or a {type(current).__name__}, in "
            f"place of {given}"
        )
    merged = _merged(msgspec.to_builtins(current, enc_hook=_plain), msgspec.to_builtins(changes, enc_hook=_plain))
    if section == "boundary":
        for part in merged.values():
            if isinstance(part, Mapping):
                refuse_registered_name(part.get("kind"), "a dictionary of settings")
    return from_table(merged, type(current), where=f"overrides of [{section}]")


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; a path as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the changes; None is the value of a key that is left out."""
    merged = dict(table)
    for key, value in changes.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}
