"""Run presets: TOML files of the package, named `preset:NAME` on a command line in place of a file path."""

from pathlib import Path

from thinpipe.core.errors import UserError

_PREFIX = "preset:"
_FOLDER = Path(__file__).parent / "run_presets"


def preset_names() -> list[str]:
    """All run presets, as they are written on a command line (preset:NAME)."""
    return [f"{_PREFIX}{path.stem}" for path in sorted(_FOLDER.glob("*.toml"))]


def settings_file(named: str) -> Path:
    """Path of the settings file that a command line names: a path, or preset:NAME. Raises UserError for an unknown
    preset."""
    if not named.startswith(_PREFIX):
        return Path(named)
    if named not in preset_names():
        raise UserError(f"{named} does not come with thinpipe: there are {', '.join(preset_names())}")
    return _FOLDER / f"{named.removeprefix(_PREFIX)}.toml"
