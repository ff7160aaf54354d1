"""Runs that come with thinpipe: `preset:NAME` in the place of a file. No torch here."""

from pathlib import Path

from thinpipe.core.errors import UserError

_PREFIX = "preset:"
_FOLDER = Path(__file__).parent / "presets"


def shipped() -> list[str]:
    """What may be written in the place of a file."""
    return [f"{_PREFIX}{path.stem}" for path in sorted(_FOLDER.glob("*.toml"))]


def settings_file(named: str) -> Path:
    """The file that a command line names."""
    if not named.startswith(_PREFIX):
        return Path(named)
    if named not in shipped():
        raise UserError(f"{named} does not come with thinpipe: there are {', '.join(shipped())}")
    return _FOLDER / f"{named.removeprefix(_PREFIX)}.toml"
