"""What a report has from elsewhere than the event log: names, widths of the model, default settings, a sample."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpipe.core.config import differences
from thinpipe.report.document import Quote
from thinpipe.report.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Background:
    folder: Path
    """Of the run, as the person named it."""
    dim: int | None = None
    """The model's width, if it is known."""
    state_width: int | None = None
    """Numbers of a token that cross a boundary."""
    has_neck: bool = False
    """Its export brings code of its own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a run that sets none."""
    sample: Quote | None = None
    against: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def settings_of(summary: Summary) -> dict[str, Any]:
    """The sections of the last start; nothing where the log has none that can be read."""
    if not summary.starts:
        return {}
    try:
        settings = tomllib.loads(summary.starts[-1].config)
    except tomllib.TOMLDecodeError:  # a peer's text
        return {}
    return {name: section for name, section in settings.items() if isinstance(section, dict)}


def own_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[list[str]]:
    """Those that differ from the defaults: name, value, default. What a log of an older version lacks is no setting."""
    rows = []
    for name in differences(dict(defaults), dict(settings)):
        value, default = _lookup(settings, name), _lookup(defaults, name)
        for key, found in _flat(value, name):
            rows.append([key, _say(found), _say(default if key == name else None)])
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


def _say(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value).lower() if value is True else str(value)
