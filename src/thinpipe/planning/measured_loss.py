"""Loss cost of boundary compression: the measured figure nearest to a plan, if there is one.

The figures are those of benchmarks/results/own and benchmarks/results/convergence (a test compares them): Llama,
d = 256, 8 blocks, four segments, books, validation loss against a dense run of the same seed and tokens.
"""

import math
from typing import NamedTuple

from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import ProjectionConfig
from thinpipe.planning.stored_model import PlannedModel, StoredModel

_MAX_BYTES_FACTOR = 1.5
"""Largest ratio between the bytes of a plan and of a measurement for which the measurement is quoted."""


class LossGap(NamedTuple):
    """One measurement."""

    kind: str
    compression_ratio: float
    """Bytes of dense bf16 divided by those of the method, both directions, token ids included."""
    percent: float
    """Validation loss above that of the dense run, in percent."""
    million_tokens: float
    seeds: int
    """Number of seeds."""
    sent: str
    """Number format of the messages."""
    record: str
    """Source: folder of benchmarks/results, and name of the run."""


MEASURED: tuple[LossGap, ...] = (
    LossGap("keel with tables that look back", 16.0, -0.19, 4.19, 3, "int4", "own: keel 16x"),
    LossGap("keel with tables that look back", 32.0, 0.58, 4.19, 3, "int4", "own: keel 32x"),
    LossGap("keel with tables of the token alone", 16.0, 0.96, 4.19, 1, "int4", "own: keel 16x, reach 1"),
    LossGap("keel with tables of the token alone", 32.0, 2.03, 4.19, 1, "int4", "own: keel 32x, reach 1"),
    LossGap("bottleneck with tables that look back", 32.0, -2.51, 1.05, 1, "int4", "own: bottleneck, our tables 32x"),
    LossGap("bottleneck", 32.0, 5.60, 4.19, 1, "int4", "own: bottleneck 32x"),
    LossGap("learned with tables of the token alone and a full one", 32.0, 1.80, 1.05, 1, "int4", "own: learned 32x"),
    LossGap("subspace", 32.0, 6.88, 4.19, 1, "int4", "own: subspace 32x"),
    LossGap("subspace", 15.5, 3.71, 1.05, 3, "bf16", "convergence: subspace 16x"),
    LossGap("subspace", 7.9, 2.64, 0.52, 1, "bf16", "convergence: subspace 8x"),
    LossGap("lowrank", 30.6, 5.84, 1.05, 1, "bf16", "own: lowrank 32x"),
    LossGap("lowrank", 16.5, 4.66, 0.52, 1, "bf16", "convergence: lowrank 16x"),
    LossGap("lowrank", 8.0, 3.74, 0.52, 1, "bf16", "convergence: lowrank 8x"),
    LossGap("topk", 31.2, 14.70, 1.05, 1, "bf16", "own: topk 32x"),
    LossGap("topk", 16.1, 6.10, 0.52, 1, "bf16", "convergence: topk 16x"),
    LossGap("topk", 8.1, 4.50, 1.05, 3, "bf16", "convergence: topk 8x"),
    LossGap("quantise", 3.7, 0.36, 0.52, 1, "4 bits", "convergence: quantise 4 bit"),
    LossGap("quantise", 1.9, -0.16, 0.52, 1, "8 bits", "convergence: quantise 8 bit"),
)
_SEGMENTS = 4
"""Number of segments of the measured models."""


def method_name(model: PlannedModel, boundary: BoundaryConfig) -> str:
    """Compression method of the boundaries and, for projections, the kind of token prior; as in `LossGap.kind`."""
    if isinstance(model, StoredModel):
        return "a published model" if boundary.states.kind == "none" else f"{boundary.states.kind} of a published model"
    if model.has_projection:
        return f"{model.projection.kind}{_tables(model.projection)}"
    if model.subspace.width is not None:
        return "subspace"
    return boundary.states.kind if boundary.states.kind != "none" else "dense"


def _tables(projection: ProjectionConfig) -> str:
    if projection.bigram_rows:
        return " with tables of pairs"
    if not projection.token_prior_rank:
        return " with a thin first table" if projection.embedding_rank else ""
    tables = "tables that look back" if projection.token_prior_window > 1 else "tables of the token alone"
    return f" with {tables}" if projection.embedding_rank else f" with {tables} and a full one"


def nearest_gap(model: PlannedModel, boundary: BoundaryConfig, compression_ratio: float) -> LossGap | None:
    """Measurement of the same method with the nearest bytes; None if none is within `_MAX_BYTES_FACTOR`."""
    kind = method_name(model, boundary)

    def distance(gap: LossGap) -> float:
        return abs(math.log(gap.compression_ratio / compression_ratio))

    near = [gap for gap in MEASURED if gap.kind == kind and distance(gap) <= math.log(_MAX_BYTES_FACTOR)]
    return min(near, key=distance, default=None)


def describe_loss_gap(model: PlannedModel, boundary: BoundaryConfig, compression_ratio: float) -> str:
    kind = method_name(model, boundary)
    whole = {boundary.forward, boundary.backward} <= {"fp32", "bf16"}
    exact = boundary.states.kind == "none" and not model.has_projection and not model.in_subspace
    if not model.boundaries or (exact and whole and boundary.gradients.kind == "none"):
        return "none: every number crosses"
    gap = nearest_gap(model, boundary, compression_ratio)
    if gap is None:
        return f"not measured for {kind} at {compression_ratio:.1f} times fewer bytes"
    seeds = "one seed" if gap.seeds == 1 else f"{gap.seeds} seeds"
    more = (
        "; it grows with the number of boundaries" if model.has_projection and len(model.segments) > _SEGMENTS else ""
    )
    baseline = "dense without its tables" if "tables" in kind else "dense"
    return (
        f"{gap.percent:+.1f} % validation loss against {baseline}, measured for {kind} at {gap.compression_ratio:g} "
        f"times fewer bytes in {gap.sent}, d = 256, four segments, {gap.million_tokens:g} M tokens, {seeds}{more}"
    )
