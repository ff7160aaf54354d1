"""Messages of the hub's key-value store, through which the processes of a group find each other (rendezvous; a
torch.distributed Store). Client: transport/nats/store.py; server: swarm/hub/services/store.py. Small values only.
Imports no torch: the hub needs none."""

from typing import Annotated, Literal

import msgspec

from thinpipe.core.bounds import VERBATIM, Seconds

SERVICE = "store"
MAX_KEYS_PER_REQUEST = 1000
_Key = Annotated[str, msgspec.Meta(max_length=200, extra=VERBATIM)]
_Value = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the hub's store. "get" (one key) and "wait" (several) wait for `keys`; "set", "add", "swap"
    (compare_set) and "delete" change one key; "count" counts all keys."""

    what: Literal["set", "get", "add", "swap", "delete", "count", "wait"]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS_PER_REQUEST)] = []
    value: _Value = b""
    expected: _Value = b""
    """Value that "swap" must find for it to write `value`; empty also matches an absent key."""
    amount: Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)] = 0
    """Number that "add" adds to the counter of the key; a missing counter is 0."""
    wait_seconds: Seconds = 0.0
    """Seconds that the hub may wait for the keys before it replies."""

    def __post_init__(self) -> None:
        wanted = {"wait": len(self.keys) > 0, "count": not self.keys}.get(self.what, len(self.keys) == 1)
        if not wanted:
            raise ValueError(f"{self.what} of {len(self.keys)} keys")


class StoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the hub's store."""

    found: bool
    """False if a wait ended without the keys, a key to delete was absent, or a limit of the store is exceeded."""
    value: _Value = b""
    """Value read by "get"; for "swap" the value stored afterwards."""
    number: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] = 0
    """For "add" the new counter, for "count" the number of keys."""
