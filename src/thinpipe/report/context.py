"""Inputs of a report that are not in the event log: folder, model widths, default settings, sample text, other runs."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpipe.config.toml import differences
from thinpipe.report.document import Quote
from thinpipe.report.summary import Summary


@dataclass(frozen=True, kw_only=True)
class ReportContext:
    folder: Path
    """Folder of the run, as given on the command line."""
    dim: int | None = None
    """Width of the residual stream. None: unknown."""
    state_width: int | None = None
    """Numbers per token and direction that cross a boundary. None: unknown."""
    has_projection: bool = False
    """True for a model with boundary projections, whose Hugging Face export includes custom code."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default settings of a run, as TOML tables."""
    sample: Quote | None = None
    against: Mapping[str, Summary] = field(default_factory=dict)
    """Runs to compare with, by name."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def settings_of(summary: Summary) -> dict[str, Any]:
    """Settings of the last start, by section; empty if the log has no readable ones."""
    if not summary.starts:
        return {}
    try:
        settings = tomllib.loads(summary.starts[-1].config)
    except tomllib.TOMLDecodeError:  # written by a peer, so it may be anything
        return {}
    return {name: section for name, section in settings.items() if isinstance(section, dict)}


def changed_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[list[str]]:
    """Rows (name, value, default) of the settings that differ from the defaults. Settings that an older log lacks are
    left out."""
    rows = []
    for name in differences(dict(defaults), dict(settings)):
        value, default = _lookup(settings, name), _lookup(defaults, name)
        for key, found in _flat(value, name):
            rows.append([key, _format_value(found), _format_value(default if key == name else None)])
    return rows


def _lookup(table: Mapping[str, Any], name: str) -> Any:
    value: Any = table
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [entry for key, inner in value.items() for entry in _flat(inner, f"{name}.{key}")]
    return [(name, value)]


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value).lower() if value is True else str(value)
