"""The one door through which data of other machines comes in: `decode_foreign` returns a message of the wanted type,
with values within the bounds of its fields (`core.bounds`) and plain texts, or raises `ProtocolError`. Nothing else is
raised, whatever the data. `foreign_table` does the same for settings in TOML."""

import tomllib
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, overload

import msgspec

from thinpipe.core.bounds import VERBATIM
from thinpipe.core.errors import DECODE_ERRORS

Kind = TypeVar("Kind")
MAX_NBYTES = 8 << 20
"""Longest message that is decoded, in bytes: no NATS server of ours takes a longer one."""
MAX_SETTINGS_NBYTES = 1 << 18
_MAX_NUMBER, _MAX_TEXT_CHARACTERS = (1 << 63) - 1, 1000
_MAX_REASON_CHARACTERS = 300


class ProtocolError(ConnectionError):
    """Another machine has sent what it must not send: malformed, out of bounds or out of order. A ConnectionError:
    nothing more can be done with that machine in this generation."""


@overload
def decode_foreign(data: bytes, kind: type[Kind], *, form: Literal["msgpack", "json"] = "msgpack") -> Kind: ...
@overload
def decode_foreign(data: bytes, kind: Any, *, form: Literal["msgpack", "json"] = "msgpack") -> Any: ...
def decode_foreign(data: bytes, kind: Any, *, form: Literal["msgpack", "json"] = "msgpack") -> Any:
    """The message in this data. Characters in its texts that are not printable are replaced, except in texts marked
    `bounds.VERBATIM`. Raises ProtocolError, which says what is wrong, for any data that is not such a message."""
    if len(data) > MAX_NBYTES:
        raise ProtocolError(f"a message of {len(data)} bytes, more than the {MAX_NBYTES} allowed")
    try:
        return _plain(_decoder(kind, form)(data))
    except DECODE_ERRORS as error:
        raise ProtocolError(f"a message that is not valid: {sanitize(error, _MAX_REASON_CHARACTERS)}") from None


def foreign_table(text: str | bytes) -> dict[str, Any]:
    """The table in this TOML. Raises ProtocolError, which says what is wrong, unless it is one of plain texts and of
    numbers that fit into 64 bits."""
    if len(text) > MAX_SETTINGS_NBYTES:
        raise ProtocolError(f"settings of {len(text)} bytes, more than the {MAX_SETTINGS_NBYTES} allowed")
    try:
        table = tomllib.loads(text if isinstance(text, str) else text.decode())
        _refuse_odd_values(table)
    except (ValueError, RecursionError) as error:  # ValueError: also of tomllib and of UTF-8
        raise ProtocolError(f"settings that are not valid: {sanitize(error, _MAX_REASON_CHARACTERS)}") from None
    return table


def _refuse_odd_values(value: Any) -> None:
    match value:
        case dict():
            for key, item in value.items():
                _refuse_odd_values(key)
                _refuse_odd_values(item)
        case list():
            for item in value:
                _refuse_odd_values(item)
        case str() if not value.isprintable() or len(value) > _MAX_TEXT_CHARACTERS:
            raise ValueError("a text that is too long or not plain")
        case int() if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise ValueError("a number of more than 64 bits")


def sanitize(text: object, max_characters: int = 500) -> str:
    """Untrusted text made safe to print: truncated, with non-printable characters (terminal control codes) replaced."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:max_characters])


@cache
def _decoder(kind: Any, form: str) -> Callable[[bytes], Any]:
    decoder = msgspec.json.Decoder(kind) if form == "json" else msgspec.msgpack.Decoder(kind)
    return decoder.decode


def _plain(value: Any) -> Any:
    """The value, which nobody has seen yet, with all texts in it made plain."""
    match value:
        case str():
            return value if value.isprintable() else sanitize(value, len(value))
        case msgspec.Struct():
            for name in _fields_with_texts(type(value)):
                msgspec.structs.force_setattr(value, name, _plain(getattr(value, name)))
            return value
        case dict():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(_plain, value))
    return value


@cache
def _fields_with_texts(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Fields of a struct that may hold texts to be made plain."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(name for name in kind.__struct_fields__ if _may_hold_text(hints[name]))


def _may_hold_text(hint: Any) -> bool:
    if hint is str or hint is Any:
        return True
    if typing.get_origin(hint) is typing.Literal:
        return False
    if typing.get_origin(hint) is typing.Annotated:
        kind, *notes = typing.get_args(hint)
        is_verbatim = any(isinstance(note, msgspec.Meta) and note.extra == VERBATIM for note in notes)
        return not is_verbatim and _may_hold_text(kind)
    is_struct = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    return is_struct or any(map(_may_hold_text, typing.get_args(hint)))
