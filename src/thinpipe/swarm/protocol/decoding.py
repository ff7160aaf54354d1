"""Decodes untrusted messages: a message of the expected type, or None. No input can raise an exception."""

from typing import Any, TypeVar

import msgspec

from thinpipe.core.errors import DECODE_ERRORS

Kind = TypeVar("Kind")
Decoder = msgspec.msgpack.Decoder[Kind] | msgspec.json.Decoder[Kind]


def decode_or_none(decoder: "Decoder[Kind]", data: bytes) -> Kind | None:
    """The decoded message; None if the data is not a valid message of the decoder's type."""
    try:
        return decoder.decode(data)
    except DECODE_ERRORS:
        return None


def sanitize(text: Any, max_characters: int = 500) -> str:
    """Untrusted text made safe to print: truncated, with non-printable characters (terminal control codes) replaced."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:max_characters])
