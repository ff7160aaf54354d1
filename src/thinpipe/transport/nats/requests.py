"""What peers ask the hub's store, and what it answers. No torch here: the hub needs none."""

from typing import Annotated, Literal

import msgspec

SERVICE = "store"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the hub. `wait_seconds`: how long it may wait for the keys before it answers."""

    what: Literal["set", "get", "add", "swap", "delete", "count", "wait"]
    keys: list[str] = []
    value: bytes = b""
    expected: bytes = b""
    amount: Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)] = 0
    wait_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    found: bool
    value: bytes = b""
    number: int = 0
