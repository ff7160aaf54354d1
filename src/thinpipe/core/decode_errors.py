"""Exceptions that msgspec decoders raise for damaged or hostile data."""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Wrong type or malformed data, invalid UTF-8, too deeply nested lists."""
