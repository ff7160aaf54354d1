"""Reads TOML files into frozen settings dataclasses, and writes them. An unknown key raises a UserError that suggests
the nearest known key.

Command-line flags override the file's values (see `cli`). Environment variables never override an argument.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from thinpipe.core.errors import UserError

Config = TypeVar("Config")


def load_toml(path: Path, config_type: type[Config]) -> Config:
    """The settings of a file; missing keys keep their defaults. Raises UserError."""
    return from_table(_read(path), config_type, where=str(path))


def load_toml_below_flags(path: Path, config_type: type[Config], flags: Iterable[str]) -> Config:
    """The settings of a file as defaults of command-line flags: without the keys that these set (training.steps), and
    with no check of the values against one another, which whoever adds the flags' values makes. Raises UserError."""
    table = _read(path)
    refuse_unknown_keys(table, config_type, where=str(path))
    for flag in flags:
        _make_room(table, flag)
    with _readable_errors(config_type, str(path)):
        return _unchecked(table, config_type)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, and a TOML file is wanted here") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def from_table(table: dict[str, Any], config_type: type[Config], *, where: str) -> Config:
    """The settings of a parsed table; `where` names its file in error messages. Raises UserError."""
    refuse_unknown_keys(table, config_type, where=where)
    with _readable_errors(config_type, where):
        return msgspec.convert(table, config_type, dec_hook=_decode)


def _make_room(table: dict[str, Any], key: str) -> None:
    """Removes a dotted key; its section is there afterwards, even if it is an optional one."""
    section, _, rest = key.partition(".")
    if not rest:
        table.pop(section, None)
    elif isinstance(inner := table.setdefault(section, {}), dict):
        _make_room(inner, rest)


def _unchecked(table: dict[str, Any], config_type: type[Config], prefix: str = "$") -> Config:
    """As `from_table`, without `__post_init__`: only types are checked."""
    hints = typing.get_type_hints(config_type)
    config = object.__new__(config_type)
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        section, place = section_type(hints[field.name]), f"{prefix}.{field.name}"
        if field.name not in table:
            make = field.default_factory
            value = field.default if make is dataclasses.MISSING else make()
        elif section is not None and isinstance(table[field.name], dict):
            value = _unchecked(table[field.name], section, place)
        else:
            value = _convert(table[field.name], hints[field.name], place)
        object.__setattr__(config, field.name, value)
    return config


def _convert(value: Any, hint: Any, place: str) -> Any:
    try:
        return msgspec.convert(value, hint, dec_hook=_decode)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{what} - at `{place}{inner.rstrip('`')}`") from None


@contextmanager
def _readable_errors(config_type: Any, where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_readable_error(str(error), config_type)}") from None


def dump_toml(config: Any) -> str:
    """TOML text that loads to the same settings. TOML has no null, so fields that are None are omitted: None must be
    their default."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config, enc_hook=str)))


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Changed values between two tables, by dotted key: {"training.steps": "100 -> 200"}."""
    found: dict[str, str] = {}
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found |= differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found[f"{prefix}{key}"] = f"{before} -> {after}"
    return found


def refuse_unknown_keys(table: dict[str, Any], config_type: Any, *, where: str, prefix: str = "") -> None:
    """Raises UserError for a key that is no setting, with the nearest one."""
    sections = {field.name: field.type for field in dataclasses.fields(config_type)}
    hints = typing.get_type_hints(config_type)
    for key, value in table.items():
        if key not in sections:
            nearest = difflib.get_close_matches(key, sections, n=1, cutoff=0.5)
            advice = f"did you mean {prefix}{nearest[0]}?" if nearest else f"there are: {', '.join(sections)}"
            raise UserError(f"{where}: unknown key {prefix}{key}: {advice}")
        section = section_type(hints[key])
        if section is not None and isinstance(value, dict):
            refuse_unknown_keys(value, section, where=where, prefix=f"{prefix}{key}.")
        elif section is not None and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    refuse_unknown_keys(item, section, where=where, prefix=f"{prefix}{key}[{index}].")


def section_type(hint: Any) -> Any:
    """The dataclass behind `Section` or `tuple[Section, ...]`, also `| None` and where the type is annotated."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is tuple:
        return next((section for option in typing.get_args(hint) if (section := section_type(option))), None)
    return hint if dataclasses.is_dataclass(hint) else None


def _decode(wanted: type[Any], value: Any) -> Any:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(wanted)


def _readable_error(message: str, config_type: Any) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.training.steps`" as "training.steps: expected int, got str", and the
    values of a setting that has few."""
    what, separator, place = message.partition(" - at `$.")
    what, place = what.replace("`", ""), place.rstrip("`")
    choices = ", ".join(map(repr, _choices(config_type, place)))
    text = f"{place}: {what[:1].lower()}{what[1:]}" if separator else what
    return f"{text}: write one of {choices}" if choices else text


def _choices(config_type: Any, place: str) -> tuple[str, ...]:
    """Values of the setting at a dotted key, if it has a `Literal` type; else none."""
    hint: Any = config_type
    for name in place.split("."):
        section = section_type(hint)
        hint = typing.get_type_hints(section).get(name) if section else None
    return literal_values(hint)


def literal_values(hint: Any) -> tuple[Any, ...]:
    """The values of `Literal[...]`, also beside other types; none for another type."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    is_several = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = typing.get_args(hint) if is_several else (hint,)
    return tuple(
        value for member in members if typing.get_origin(member) is typing.Literal for value in typing.get_args(member)
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
