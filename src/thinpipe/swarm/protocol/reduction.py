"""Messages of the step reduction: the small all-reduce that all peers of a generation do through the hub in every step.

One round trip per reduction; all peers receive the same bytes.
"""

from typing import Annotated, Literal

import msgspec

from thinpipe.core.bounds import Count, GenerationNumber, LongText

ReduceOp = Literal["sum", "counts", "equal", "step"]
"""All but `equal` are sums. `counts`: of numbers of bytes, for which the hub sees to their bounds. `equal`: all peers
have to contribute the same. `step`: of the vector of a step (`training.step_vector`), which the hub reads."""
SERVICE = "reduce"
MAX_VALUES = 1 << 20
"""Maximum number of values in one contribution."""
_Values = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_VALUES)]
MAX_WAIT_SECONDS = 20.0
"""Seconds after which the hub answers without a result, so that the peer sees that the hub is alive and asks again."""


class ReduceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer's contribution to one all-reduce."""

    generation: GenerationNumber
    round_number: Count
    """Number of the all-reduce within the generation, from 1."""
    op: ReduceOp
    values: _Values
    """Contributed values: float64, little-endian."""

    def __post_init__(self) -> None:
        _refuse_part_of_a_number(self.values)


class ReduceReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of an all-reduce."""

    values: _Values | None = None
    """Reduced values (float64, little-endian); None: not all peers have contributed yet, ask again."""
    refusal: LongText = ""
    """Reason of a refusal, such as the end of the generation; empty: accepted."""

    def __post_init__(self) -> None:
        _refuse_part_of_a_number(self.values or b"")


def _refuse_part_of_a_number(values: bytes) -> None:
    if len(values) % 8:
        raise ValueError(f"{len(values)} bytes are no row of float64")
