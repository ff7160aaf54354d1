"""What fewer bytes cost in loss, as our studies measured it: the nearest figure to a plan, or that there is none.

The figures are those of benchmarks/results/own and benchmarks/results/convergence (a test compares them): Llama,
d = 256, 8 blocks, four segments, books, validation loss against a dense run of the same seed and tokens.
"""

import math
from typing import NamedTuple

from thinpipe.boundary.settings import BoundarySection
from thinpipe.models.config import ModelConfig, NeckConfig

_FACTOR = 1.5
"""A figure is told for a plan whose bytes differ by at most this much."""


class Gap(NamedTuple):
    kind: str
    times_fewer: float
    """Bytes than dense bf16, both directions, ids counted."""
    percent: float
    million_tokens: float
    seeds: int
    sent: str
    """In which numbers."""
    record: str
    """Where it stands: the name of the run, and the folder of benchmarks/results."""


MEASURED: tuple[Gap, ...] = (
    Gap("keel with tables that look back", 16.0, -0.19, 4.19, 3, "int4", "own: keel 16x"),
    Gap("keel with tables that look back", 32.0, 0.58, 4.19, 3, "int4", "own: keel 32x"),
    Gap("keel with tables of the token alone", 16.0, 0.96, 4.19, 1, "int4", "own: keel 16x, reach 1"),
    Gap("keel with tables of the token alone", 32.0, 2.03, 4.19, 1, "int4", "own: keel 32x, reach 1"),
    Gap("bottleneck with tables that look back", 32.0, -2.51, 1.05, 1, "int4", "own: bottleneck, our tables 32x"),
    Gap("bottleneck", 32.0, 5.60, 4.19, 1, "int4", "own: bottleneck 32x"),
    Gap("learned with tables of the token alone and a full one", 32.0, 1.80, 1.05, 1, "int4", "own: learned 32x"),
    Gap("subspace", 32.0, 6.88, 4.19, 1, "int4", "own: subspace 32x"),
    Gap("subspace", 15.5, 3.71, 1.05, 3, "bf16", "convergence: subspace 16x"),
    Gap("subspace", 7.9, 2.64, 0.52, 1, "bf16", "convergence: subspace 8x"),
    Gap("lowrank", 30.6, 5.84, 1.05, 1, "bf16", "own: lowrank 32x"),
    Gap("lowrank", 16.5, 4.66, 0.52, 1, "bf16", "convergence: lowrank 16x"),
    Gap("lowrank", 8.0, 3.74, 0.52, 1, "bf16", "convergence: lowrank 8x"),
    Gap("topk", 31.2, 14.70, 1.05, 1, "bf16", "own: topk 32x"),
    Gap("topk", 16.1, 6.10, 0.52, 1, "bf16", "convergence: topk 16x"),
    Gap("topk", 8.1, 4.50, 1.05, 3, "bf16", "convergence: topk 8x"),
    Gap("quantise", 3.7, 0.36, 0.52, 1, "4 bits", "convergence: quantise 4 bit"),
    Gap("quantise", 1.9, -0.16, 0.52, 1, "8 bits", "convergence: quantise 8 bit"),
)
_SEGMENTS = 4
"""Of the models that were measured."""


def kind_of(model: ModelConfig, boundary: BoundarySection) -> str:
    """What makes the messages short, and what a segment knows of tokens by itself."""
    if model.has_neck:
        return f"{model.neck.kind}{_tables(model.neck)}"
    if model.subspace.width is not None:
        return "subspace"
    return boundary.states.kind if boundary.states.kind != "none" else "dense"


def _tables(neck: NeckConfig) -> str:
    if neck.ngram_rows:
        return " with tables of pairs"
    if not neck.anchor_rank:
        return " with a thin first table" if neck.first_rank else ""
    tables = "tables that look back" if neck.anchor_reach > 1 else "tables of the token alone"
    return f" with {tables}" if neck.first_rank else f" with {tables} and a full one"


def nearest_gap(model: ModelConfig, boundary: BoundarySection, times_fewer: float) -> Gap | None:
    """Of the same kind, and nearest in bytes if any is near."""
    kind = kind_of(model, boundary)

    def distance(gap: Gap) -> float:
        return abs(math.log(gap.times_fewer / times_fewer))

    near = [gap for gap in MEASURED if gap.kind == kind and distance(gap) <= math.log(_FACTOR)]
    return min(near, key=distance, default=None)


def say_gap(model: ModelConfig, boundary: BoundarySection, times_fewer: float) -> str:
    kind = kind_of(model, boundary)
    whole = {boundary.forward, boundary.backward} <= {"fp32", "bf16"}
    if not model.boundaries or (kind == "dense" and whole and boundary.gradients.kind == "none"):
        return "none: every number crosses"
    gap = nearest_gap(model, boundary, times_fewer)
    if gap is None:
        return f"not measured for {kind} at {times_fewer:.1f} times fewer bytes"
    seeds = "one seed" if gap.seeds == 1 else f"{gap.seeds} seeds"
    more = "; it grows with the number of boundaries" if model.has_neck and len(model.segments) > _SEGMENTS else ""
    return (
        f"{gap.percent:+.1f} % validation loss against dense, measured for {kind} at {gap.times_fewer:g} times fewer "
        f"bytes in {gap.sent}, d = 256, four segments, {gap.million_tokens:g} M tokens, {seeds}{more}"
    )
