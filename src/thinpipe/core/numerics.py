"""The numerics version: which numbers this thinpipe computes. Peers of one run must compute the same ones.

`tests/golden/` holds digests of what it computes. Code may be renamed, moved and made faster; as long as no digest
changes, versions of thinpipe work together. Whoever changes one raises `NUMERICS_VERSION` in the same commit and says
why in `tests/golden/versions.toml`.
"""

from functools import cache
from importlib.metadata import version
from typing import Annotated

import msgspec

import thinpipe

NUMERICS_VERSION = 1
KNOWN_TORCH = "2.13."
"""Whose private names were checked; see pipeline/stage.py."""


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that two machines compare before they compute together."""

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    """`NUMERICS_VERSION` of its thinpipe."""
    torch: Annotated[str, msgspec.Meta(max_length=200)]
    """Its version. Builds for other devices are the same."""


@cache
def numerics() -> Numerics:
    """Those of this thinpipe, with the torch that is installed."""
    return Numerics(version=NUMERICS_VERSION, torch=version("torch").partition("+")[0])


def why_other_numbers(peer: Numerics, hub: Numerics) -> str:
    """Why a peer would compute other numbers than its hub, for the person who sits there; empty if it would not."""
    if peer.version != hub.version:
        return (
            f"you compute with numerics version {peer.version} and the hub with {hub.version}: install the hub's "
            f"version of thinpipe, {thinpipe.__version__}"
        )
    if peer.torch != hub.torch:
        return f"you compute with torch {peer.torch} and the hub with {hub.torch}: install torch {hub.torch}"
    return ""
