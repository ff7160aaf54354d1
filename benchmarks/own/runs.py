"""Which runs the study of the keel has, by priority. All have as many trainable numbers as dense, within 3 %."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.convergence.study import Study
from thinpipe.boundary.settings import BoundarySection
from thinpipe.models.config import NeckConfig

TOKENS, SEEDS, SEGMENTS = 4_194_304, (0, 1, 2), 4
INT4 = BoundarySection(forward="int4", backward="int4")
WIDTH = {16: 58, 32: 26}
"""By how many times fewer bytes than dense bf16, in int4 both ways, ids and scales counted."""

DENSE = Study(
    question="result", name="dense", kind="dense", priority=0, tokens=TOKENS, lr=1.5e-3, microbatch=16, compiled=True
)


def dealt(width: int, dim: int = 256, segments: int = SEGMENTS) -> NeckConfig:
    """A keel, and the token table of a dense model dealt out to the segments."""
    rank = dim // segments
    return NeckConfig(width=width, anchor_rank=rank, first_rank=rank)


def keel(ratio: int) -> Study:
    return replace(DENSE, name=f"keel {ratio}x", kind="keel", neck=dealt(WIDTH[ratio]), boundary=INT4)


WHOLE = replace(DENSE, name="dense, table dealt out", kind="keel", neck=dealt(256))
"""What the tables alone change: all channels cross, in bf16."""


def result() -> Iterator[Study]:
    for seed in SEEDS:
        for order, study in enumerate((DENSE, keel(32), keel(16), WHOLE)):
            yield replace(study, seed=seed, priority=10 * seed + order)


def all_runs() -> list[Study]:
    return sorted(result(), key=lambda study: study.priority)
