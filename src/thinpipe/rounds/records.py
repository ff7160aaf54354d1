"""Records of `rounds.jsonl`, from which the rounds of a run can be computed again: each is durable before anybody
relies on it."""

from typing import Annotated

import msgspec

from thinpipe.core.bounds import MAX_FILES, MAX_REPLICAS, Count, GenerationNumber, LayerFileName, Sha256
from thinpipe.rounds.leases import Ranges, joined

Span = tuple[Count, Count]
"""First batch, and the one after the last."""
Spans = Annotated[list[Span], msgspec.Meta(max_length=10_000)]
Files = Annotated[dict[LayerFileName, Sha256], msgspec.Meta(max_length=MAX_FILES)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="what"):
    round: Count
    """From 1."""


class Leased(_Record, frozen=True, kw_only=True, tag="leased"):
    """A replica trains on these batches in this round, from the weights that the round before has merged."""

    replica: Count
    generation: GenerationNumber
    batches: Spans


class Returned(_Record, frozen=True, kw_only=True, tag="returned"):
    """A replica was lost before its contribution was here: its batches may be leased again."""

    replica: Count
    generation: GenerationNumber


class Contributed(_Record, frozen=True, kw_only=True, tag="contributed"):
    """What the weights of a replica have changed by is here, and counts whatever becomes of the replica."""

    replica: Count
    generation: GenerationNumber
    batches: Spans
    """Batches that it has trained on: the first of its lease."""
    files: Files
    """sha256 of each layer's file."""


class Closed(_Record, frozen=True, kw_only=True, tag="closed"):
    """Nobody else is waited for: these replicas are merged, in this order."""

    replicas: Annotated[list[Count], msgspec.Meta(max_length=MAX_REPLICAS, min_length=1)]


class MergedRound(_Record, frozen=True, kw_only=True, tag="merged"):
    """The round is over."""

    finished: Count
    """Batches that are counted by now."""
    update: Files
    """sha256 of each layer of the update."""
    weights: Files
    """sha256 of each layer after it."""


RoundRecord = Leased | Returned | Contributed | Closed | MergedRound


def spans(ranges: Ranges) -> list[Span]:
    return [(each.start, each.stop) for each in ranges]


def ranges_of(found: list[Span]) -> Ranges:
    """Raises ValueError if a batch is there twice."""
    return joined(range(start, stop) for start, stop in found)
