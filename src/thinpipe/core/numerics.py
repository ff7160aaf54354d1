"""Numerics version: grows whenever thinpipe computes other bits than before. The hub refuses peers whose numerics
version or torch version differs from its own. Hardware is not compared: different CPUs and GPUs may differ in the last
digits.

`tests/golden/` holds digests of computed results. Thinpipe versions with equal digests are compatible, however their
code differs. A commit that changes a digest must increment `NUMERICS_VERSION` and give the reason in
`tests/golden/versions.toml`.
"""

from functools import cache
from importlib.metadata import version
from typing import Annotated

import msgspec

import thinpipe

NUMERICS_VERSION = 3
TESTED_TORCH = ("2.13", "2.14", "2.15")
"""Minor versions of torch with which the tests of the pipeline have passed; the range in pyproject.toml is the same."""
INSTALL_TORCH = f'pip install "torch=={TESTED_TORCH[-1]}.*"'


def is_tested_torch(found: str) -> bool:
    """`found`: a version of torch, as 2.15.0+cpu."""
    return ".".join(found.split(".")[:2]) in TESTED_TORCH


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions that must be equal on all machines of a run. Sent by a peer when it joins."""

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    """`NUMERICS_VERSION` of the machine's thinpipe."""
    torch: Annotated[str, msgspec.Meta(max_length=200)]
    """torch version without the local build tag (+cpu, +cu126): builds for different devices count as equal."""


@cache
def numerics() -> Numerics:
    """Versions of this machine: of this thinpipe and of the installed torch."""
    return Numerics(version=NUMERICS_VERSION, torch=version("torch").partition("+")[0])


def numerics_mismatch(peer: Numerics, hub: Numerics) -> str:
    """Message for the peer's user if peer and hub have incompatible numerics; empty if they are compatible.

    To be called in the hub: the message names the thinpipe version of the calling process as the hub's.
    """
    if peer.version != hub.version:
        return (
            f"your copy of thinpipe differs from the hub's (yours has numerics version {peer.version}, the hub's "
            f"{hub.version}): install the hub's version of thinpipe, {thinpipe.__version__}"
        )
    if peer.torch != hub.torch:
        both = f"yours is {peer.torch}, the hub's {hub.torch}"
        return f"your torch differs from the hub's ({both}): install torch {hub.torch}"
    return ""
