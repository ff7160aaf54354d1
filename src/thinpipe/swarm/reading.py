"""Reads what strangers send: a message of the expected kind, or nothing. No bytes can raise anything here."""

from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
Decoder = msgspec.msgpack.Decoder[Kind] | msgspec.json.Decoder[Kind]

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises: for bytes of another kind, text that is no UTF-8, lists in lists in lists."""


def read(decoder: "Decoder[Kind]", data: bytes) -> Kind | None:
    try:
        return decoder.decode(data)
    except UNREADABLE:
        return None


def say(text: Any, most: int = 500) -> str:
    """A stranger's text as it may be shown: of bounded length, and nothing in it moves a cursor or rings a bell."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:most])
