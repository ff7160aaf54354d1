"""Requests to the hub's store and its replies. Imports no torch: the hub needs none."""

from typing import Annotated, Literal

import msgspec

SERVICE = "store"


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the hub's store. "get" and "wait" wait for `keys`, "swap" is the store's compare_set."""

    what: Literal["set", "get", "add", "swap", "delete", "count", "wait"]
    keys: list[str] = []
    value: bytes = b""
    expected: bytes = b""
    """Value that "swap" must find for it to write `value`; empty also matches an absent key."""
    amount: Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)] = 0
    wait_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds that the hub may wait for the keys before it replies."""


class StoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the hub's store."""

    found: bool
    """False if a wait ended without the keys, a key to delete was absent, or a limit of the store is exceeded."""
    value: bytes = b""
    number: int = 0
