"""Parses and formats rates, durations, sizes and token counts: "80mbps", "20ms", "12GB", "10B". Rates are in bits per
second, as internet providers state them. Parsers raise UserError. Also: bytes per number of each data type, and short
lists of names."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from thinpipe.core.errors import UserError

ITEM_NBYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per number, by the name of its data type."""
BF16_NBYTES = ITEM_NBYTES["bfloat16"]

_BITS_PER_SECOND = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
_SECONDS = {"ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)", re.ASCII)
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def parse_rate(text: str) -> float:
    """Parses a rate to bits per second, above 0."""
    rate = _parse(text, _BITS_PER_SECOND)
    if not rate:
        raise UserError(f"{text!r} is not a rate: write bits per second, such as 500kbps, 80mbps or 1gbps")
    return rate


def parse_duration(text: str) -> float:
    """Parses a duration to seconds, 0 or more."""
    duration = _parse(text, _SECONDS)
    if duration is None:
        raise UserError(f"{text!r} is not a duration: write milliseconds or seconds, such as 20ms or 0.5s")
    return duration


def parse_bytes(text: str) -> float:
    """Parses a size to bytes, above 0."""
    nbytes = _parse(text, {name.lower(): value for name, value in _BYTES.items()})
    if not nbytes:
        raise UserError(f"{text!r} is not a size: write bytes, such as 500MB or 12GB")
    return nbytes


def parse_count(text: str) -> int:
    """Parses a number of tokens: 300000, 10M, 1.5B, 1T."""
    count = float(text) if text.isascii() and text.isdigit() else _parse(text, _COUNTS)
    if not count:
        raise UserError(f"{text!r} is not a number of tokens: write it as 300000, 10M, 1.5B or 1T")
    return round(count)


def format_names(names: Sequence[str], most: int) -> str:
    """The first `most` names, for people: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def format_count(count: float) -> str:
    """A count for people, rounded: 4.2 M."""
    name = next((name for name in reversed(_COUNTS) if count >= _COUNTS[name]), None)
    return f"{count:,.0f}" if name is None else f"{count / _COUNTS[name]:.3g} {name.upper() if name != 'k' else name}"


def format_bit_rate(bits_per_second: float) -> str:
    """A rate for people, rounded: 20 Mbps."""
    name = next((name for name in reversed(_BITS_PER_SECOND) if bits_per_second >= _BITS_PER_SECOND[name]), "kbps")
    return f"{bits_per_second / _BITS_PER_SECOND[name]:.3g} {name.capitalize() if name != 'kbps' else name}"


def format_flops(flops: float) -> str:
    """Floating-point operations per second for people, rounded: 1.2 TFLOP/s."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def format_duration(seconds: float) -> str:
    """A measured duration for people, rounded: 4.2 s, 40 s, 3.1 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def utc_text(seconds: float) -> str:
    """A time in seconds since 1970, before the year 9999, as "2026-11-26 01:40 UTC"."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def format_duration_ceil(seconds: float) -> str:
    """A duration to be waited for, rounded up: 40 s, 3 min, 2 h."""
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds <= 90 * 60 else f"{math.ceil(seconds / 3600)} h"


def format_bytes(nbytes: float) -> str:
    """A size for people, rounded: 1.34 GB."""
    name = next((name for name in reversed(_BYTES) if nbytes >= _BYTES[name]), "B")
    return f"{nbytes / _BYTES[name]:.3g} {name}"


def _parse(text: str, units: dict[str, float]) -> float | None:
    match = _QUANTITY.fullmatch(text.lower())
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]
