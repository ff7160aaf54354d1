"""Which runs the study of the keel has, by priority.

All have as many trainable numbers as dense: those that are `matched` exactly (their MLPs are narrower), the keel of the
result within 3 %.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.convergence.results import CONTROL
from benchmarks.convergence.runs import TOPK, lowrank
from benchmarks.convergence.study import SHAPE, TOKENS_PER_STEP, Study
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import ProjectionConfig
from thinpipe.config.run import LRSchedulerConfig

LONG, SHORT, SEEDS, DIM = 4_194_304, 1_048_576, (0, 1, 2), 256
INT8 = BoundaryConfig(forward="int8", backward="int8")
INT4 = BoundaryConfig(forward="int4", backward="int4")
WIDTH = {16: 58, 32: 26}
"""By how many times fewer bytes than dense bf16, in int4 in both directions, ids and scales counted."""
RANK = {16: 14, 32: 7}
"""Of messages of whole batches, a little more than their bytes allow."""
RATES = (None, 1, 2, 5, 20, 80)
"""Mbps at which steps are timed: at the lowest a dense pipeline does little but send."""
TOPK_RATES = {16: 3e-3, 32: 1.5e-3}
"""The best of those that `benchmarks.convergence` has tried."""
RIVAL = "bottleneck, our tables 32x"
WIDE = replace(SHAPE, dim=512, n_heads=16, n_kv_heads=8, hidden_dim=1408)

DENSE = Study(
    question="result", name="dense", kind="dense", priority=0, tokens=LONG, lr=1.5e-3, microbatch=16, compiled=True
)


def dealt(width: int, *, window: int = 4, dim: int = DIM, segments: int = 4) -> ProjectionConfig:
    """A keel, and the token table of a dense model dealt out to the segments."""
    rank = dim // segments
    return ProjectionConfig(width=width, token_prior_rank=rank, token_prior_window=window, embedding_rank=rank)


def keel(ratio: int) -> Study:
    return replace(DENSE, name=f"keel {ratio}x", kind="keel", projection=dealt(WIDTH[ratio]), boundary=INT4)


def shorter(study: Study) -> Study:
    """A quarter of the tokens, in float32."""
    return replace(study, tokens=SHORT, autocast=False, compiled=False)


def compiled(study: Study) -> Study:
    """Faster in float32 too (d = 512: 3.5 instead of 5.0 s a step, timed once); for runs compared with like ones."""
    return replace(study, autocast=False, compiled=True)


WHOLE = replace(DENSE, name="keel of all channels, bf16", kind="keel", projection=dealt(DIM))
"""What the tables alone change."""


def result() -> Iterator[Study]:
    for seed in SEEDS:
        for order, study in enumerate((DENSE, keel(32), keel(16))):
            yield replace(study, seed=seed, priority=10 * seed + order)
        yield replace(WHOLE, seed=seed, priority=30 + seed)
    for ratio, width in (*WIDTH.items(), (1, DIM)):  # tables of the token alone
        study = WHOLE if ratio == 1 else keel(ratio)
        yield replace(study, name=f"{study.name}, reach 1", projection=dealt(width, window=1), priority=33)


def control() -> Iterator[Study]:
    """Keels against the same model with all channels across a boundary, and against dense, in one precision."""
    for seed in SEEDS:
        for order, study in enumerate((WHOLE, keel(32), keel(16), DENSE)):
            yield replace(compiled(study), question=CONTROL, seed=seed, priority=10 * seed + order)


def short() -> Iterator[Study]:
    """What all that follows is compared with."""
    for seed in SEEDS:
        for study in (DENSE, keel(32), WHOLE):
            first = 57 if study is WHOLE else 47 if seed else 40
            yield replace(shorter(study), question="short", seed=seed, priority=first + seed)
    yield replace(shorter(keel(16)), question="short", priority=60)


def wide() -> Iterator[Study]:
    """Twice the width, and 64 times fewer bytes: as many numbers cross as at 32 times of the narrower one."""
    for seed in SEEDS:
        priority = 42 if seed == 0 else 45 + 2 * seed
        dense = replace(shorter(DENSE), name="dense, d = 512", shape=WIDE)
        dense = replace(dense, question="d = 512", seed=seed, priority=priority)
        if seed:  # the first pair is older
            dense = compiled(dense)
        yield dense
        projection = dealt(WIDTH[32], dim=512)
        yield replace(dense, name="keel 64x, d = 512", kind="keel", projection=projection, boundary=INT4, matched=True)
        if seed == 0:  # is the rate that suits the narrower one too high for dense?
            yield replace(compiled(dense), lr=1e-3, priority=45)


def methods() -> Iterator[Study]:
    """Everything in the registry at the same bytes, at a quarter of the tokens; some for as long as the result."""
    for order, ratio in enumerate((32, 16)):
        width = WIDTH[ratio]
        rivals = {
            "subspace": replace(DENSE, kind="row", width=width, matched=True),
            "learned": projection_of(ProjectionConfig(kind="learned", width=width, token_prior_rank=32)),
            "bottleneck": projection_of(ProjectionConfig(kind="bottleneck", width=width)),
            "learned, our tables": projection_of(replace(dealt(width), kind="learned")),
            "bottleneck, our tables": bottleneck_with_tables(width),
        }
        lossy = {
            "topk": replace(DENSE, kind="topk", boundary=TOPK[ratio], lr=TOPK_RATES[ratio]),
            "lowrank": replace(DENSE, kind="lowrank", boundary=lowrank(RANK[ratio])),
        }
        for name, study in ({name: replace(study, boundary=INT4) for name, study in rivals.items()} | lossy).items():
            study = replace(study, question="methods", name=f"{name} {ratio}x", priority=41 + 20 * order)
            yield shorter(study)
            if ratio == 32 and name in ("subspace", "bottleneck"):
                yield study


def projection_of(projection: ProjectionConfig) -> Study:
    return replace(DENSE, kind=projection.kind, projection=projection, matched=True)


def bottleneck_with_tables(width: int) -> Study:
    """A keel with small networks beside it: at 1.05 M tokens the one that comes closest to it."""
    return projection_of(replace(dealt(width), kind="bottleneck"))


def pieces() -> Iterator[Study]:
    """The keel's parts, one by one, at 32 times fewer bytes."""
    of_26 = dealt(26)
    no_tables, full_first = ProjectionConfig(width=26), ProjectionConfig(width=26, token_prior_rank=64)
    for name, projection, boundary in (
        ("26 channels, fp32", of_26, BoundaryConfig()),
        ("2 channels, fp32", dealt(2), BoundaryConfig()),
        ("12 channels, int8", dealt(12), INT8),
        ("26 channels, int4, no tables after the first", no_tables, INT4),
        ("26 channels, int4, full first table", full_first, INT4),
        ("26 channels, int4, and tables of pairs", replace(of_26, bigram_rows=4096), INT4),
    ):
        study = replace(compiled(shorter(keel(32))), projection=projection, boundary=boundary, matched=True)
        yield replace(study, question="pieces", name=name, priority=56)


def boundaries() -> Iterator[Study]:
    """All with exactly as many trainable numbers; the one with three is also what the pieces are compared with."""
    for cuts, name in (((4,), "1 boundary"), ((2, 4, 6), "3 boundaries"), ((1, 2, 3, 4, 5, 6, 7), "7 boundaries")):
        projection = dealt(WIDTH[32], segments=len(cuts) + 1)
        study = replace(compiled(shorter(keel(32))), projection=projection, cuts=cuts, matched=True)
        yield replace(study, question="boundaries", name=f"keel 32x, {name}", priority=43)


def steps_to_loss() -> Iterator[Study]:
    """How many more tokens reach dense's loss? One run at a constant rate, and branches whose rate falls to the end."""
    warmup, falling = 100, 0.2
    rival = replace(bottleneck_with_tables(WIDTH[32]), name=RIVAL, boundary=INT4)
    for study, ratios in ((DENSE, (1.0,)), (rival, (1.0,)), (keel(32), (1.0, 1.1, 1.25, 1.5, 2.0))):
        method = compiled(study)
        trunk: Study | None = None
        for ratio in ratios:
            steps = round(ratio * LONG / TOKENS_PER_STEP)
            level = LRSchedulerConfig(warmup_steps=warmup, decay_type="linear", min_lr_factor=1.0)
            decay = LRSchedulerConfig(warmup_steps=warmup, decay_type="wsd", decay_ratio=falling)
            of_all = replace(method, question="steps to loss", priority=44 if ratio <= 1.25 else 70)
            until = steps - round(falling * steps)
            trunk = replace(
                of_all,
                name=f"{method.name}, constant rate",
                tokens=until * TOKENS_PER_STEP,
                schedule=level,
                trunk=trunk,
            )
            yield trunk
            branch = replace(of_all, tokens=steps * TOKENS_PER_STEP, schedule=decay, trunk=trunk)
            yield replace(branch, name=f"{method.name}, {ratio:g} times the tokens")


def all_runs() -> list[Study]:
    runs = [*control(), *result(), *short(), *wide(), *methods(), *pieces(), *boundaries(), *steps_to_loss()]
    assert len({study.key for study in runs}) == len(runs), "two runs have one name"
    return sorted(runs, key=lambda study: study.priority)
