"""Messages of the step reduction: the small all-reduce that all peers of a generation do through the hub in every step.

One round trip per reduction; all peers receive the same bytes.
"""

from typing import Literal

import msgspec

ReduceOp = Literal["sum", "max"]
SERVICE = "reduce"
MAX_WAIT_SECONDS = 20.0
"""Seconds after which the hub answers without a result, so that the peer sees that the hub is alive and asks again."""


class ReduceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer's contribution to one all-reduce."""

    generation: int
    round_number: int
    """Number of the all-reduce within the generation, from 1."""
    op: ReduceOp
    values: bytes
    """Contributed values: float64, little-endian."""


class ReduceReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of an all-reduce."""

    values: bytes | None = None
    """Reduced values (float64, little-endian); None: not all peers have contributed yet, ask again."""
    refusal: str = ""
    """Reason of a refusal, such as the end of the generation; empty: accepted."""
