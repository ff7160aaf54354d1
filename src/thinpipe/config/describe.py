"""Describes settings classes in words: each setting's name, type, default and the text under it, for help and reference
pages. No torch."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from thinpipe.config.toml import literal_values, section_type

_WORDS = {
    "int": "integer",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "Path": "path",
    "NoneType": "none",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    type: str
    default: str
    help: str
    positional: str = ""
    """What stands for it on a command line that gives it without a flag."""
    choices: tuple[str, ...] = ()
    """Its values, if it has few."""


def sections(config: type[Any], values: Any = None, prefix: str = "") -> Iterator[tuple[str, type[Any], Any]]:
    """The dataclasses among the fields, with paths and defaults: ("model.subspace", SubspaceConfig, its default)."""
    for field, hint in _hinted(config):
        section = section_type(hint)
        if section is not None:
            default = None if _is_tuple(hint) else _default(field, values)
            yield f"{prefix}{field.name}", section, default
            yield from sections(section, default, f"{prefix}{field.name}.")


def several_of(config: type[Any], prefix: str = "") -> Iterator[str]:
    """Paths of the sections of which there may be several: "data.mixture"."""
    for field, hint in _hinted(config):
        section = section_type(hint)
        if section is not None:
            if _is_tuple(hint):
                yield f"{prefix}{field.name}"
            yield from several_of(section, f"{prefix}{field.name}.")


def _is_tuple(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return any(typing.get_origin(option) is tuple for option in (hint, *typing.get_args(hint)))


def settings_of(config: type[Any], values: Any = None) -> list[Setting]:
    """The fields that are no sections; `values` has defaults that are not the class's own."""
    helps = _helps(config)
    return [
        Setting(
            name=field.name,
            type=_type_in_words(hint),
            default=_value_in_words(_default(field, values)),
            help=helps.get(field.name, ""),
            positional=_positional(field.name, hint),
            choices=tuple(map(str, literal_values(hint))),
        )
        for field, hint in _hinted(config)
        if section_type(hint) is None
    ]


def flags_of(config: type[Any], values: Any = None) -> list[Setting]:
    """All settings, those of sections included, under the names of their flags without hyphens in front:
    training.max-norm. `values`: settings whose values stand for the defaults."""
    flags = [_as_flag(entry) for entry in settings_of(config, values)]
    several = {*several_of(config)}
    for path, section, own in sections(config, values):
        if path in several:
            continue  # no flag names an entry of a list that a file has not
        flags += [_as_flag(entry, f"{path}.") for entry in settings_of(section, own)]
    return flags


def _as_flag(entry: Setting, prefix: str = "") -> Setting:
    return dataclasses.replace(entry, name=f"{prefix}{entry.name}".replace("_", "-"))


def _hinted(config: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(config, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(config)]


def _helps(config: type[Any]) -> dict[str, str]:
    """The text under each field, of a class and of those that it is made from."""
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[line.target.id] = " ".join(text.value.split())
    return found


def _type_in_words(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        return _type_in_words(typing.get_args(hint)[0])
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_type_in_words(option) for option in options)
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_in_words(options[0])}"
    return _WORDS.get(hint.__name__, str(hint.__name__))


def _default(field: dataclasses.Field[Any], values: Any) -> Any:
    if values not in (None, dataclasses.MISSING):
        return getattr(values, field.name)
    return field.default_factory() if callable(field.default_factory) else field.default


def _value_in_words(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "empty"
    return f"`{value}`" if str(value) else "empty"


def _positional(name: str, hint: Any) -> str:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    if not any("Positional" in repr(mark) for mark in marks):
        return ""
    return next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), name.upper())
