"""Settings of a run as the API takes them: a file, a preset or a RunConfig, with sections overridden. No torch."""

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from thinpipe.config.presets import settings_file
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table, load_toml


def run_settings(config: RunConfig | Path | str, overrides: Mapping[str, Any]) -> RunConfig:
    """`config`: settings, the path of a run file, or "preset:NAME". `overrides`, by section: a dictionary of the keys
    to change (`{"steps": 100}`), or a settings object that replaces the section. Raises UserError."""
    settings = config if isinstance(config, RunConfig) else load_toml(settings_file(str(config)), RunConfig)
    from_table({section: {} for section in overrides}, RunConfig, where="overrides")  # raises for an unknown section
    sections: dict[str, Any] = {}
    for section, changes in overrides.items():
        current = getattr(settings, section)
        if is_dataclass(changes):
            sections[section] = changes
        else:
            merged = _merged(msgspec.to_builtins(current, enc_hook=str), msgspec.to_builtins(changes, enc_hook=str))
            sections[section] = from_table(merged, type(current), where=f"overrides of [{section}]")
    return replace(settings, **sections)


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the changes; None is the value of a key that is left out."""
    merged = dict(table)
    for key, value in changes.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}
