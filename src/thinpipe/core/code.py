"""Which code this is: peers of one run must compute by the same."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import thinpipe

KNOWN_TORCH = "2.13."
"""Whose private names were checked; see pipeline/stage.py."""


@cache
def code_version() -> str:
    """thinpipe's version with the beginning of the sha256 of its sources, and torch's."""
    folder = Path(thinpipe.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    torch = version("torch").partition("+")[0]  # builds for other devices are the same code
    return f"thinpipe {thinpipe.__version__} ({digest.hexdigest()[:12]}), torch {torch}"
