"""The list of runs that PREREGISTRATION.md fixes: D, D+, K16 and K32 at three widths, 20 tokens per block weight.

D is dense. D+ is the keel's model with all channels across, in bf16. K16 and K32 are keels with 16 and 32 times fewer
bytes than D, token ids and scales counted. All models of a width have as many trainable numbers as D.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.convergence.execute import is_done, result_path
from benchmarks.convergence.study import SHAPE, VOCABULARY, Study
from benchmarks.message_sizes import BF16, INT4, ROTATED_INT4, int4_channels, nbytes_per_token
from thinpipe.boundary.sizes import MessageSize
from thinpipe.config.model import ProjectionConfig
from thinpipe.config.run import CheckpointConfig, LRSchedulerConfig, ModelSettings, RunConfig, ValidationConfig

Model = Literal["D", "D+", "K16", "K32"]
MODELS: tuple[Model, ...] = ("D", "D+", "K16", "K32")
SEEDS = {64: (0, 1, 2), 96: (0, 1, 2), 128: (0, 1)}
"""Width d -> seeds."""
WIDTHS = tuple(SEEDS)
BASE_WIDTH = WIDTHS[0]
"""Width at which learning rates are tuned."""
BLOCKS, SEQ_LEN, MICROBATCH = 8, 256, 16
CUTS = {1: (4,), 3: (2, 4, 6), 7: (1, 2, 3, 4, 5, 6, 7)}
"""Number of boundaries -> indices of the blocks that they precede."""
WINDOW = 4
"""Tokens that a token prior reads."""
TOKENS_PER_WEIGHT, TUNING_TOKENS_PER_WEIGHT = 20, 10
HOURS = {64: 0.25, 96: 0.75, 128: 1.8}
"""Core-hours of a run of 20 tokens per block weight, by width, estimated in float32, compiled."""
RATES = (3e-3, 6e-3, 1.2e-2)
MORE_RATES = (1.5e-3, 2.4e-2)
"""Tried if the lowest or the highest of RATES is the best."""
TUNED_LIKE: dict[Model, Model] = {"D": "D", "D+": "D+", "K16": "K32", "K32": "K32"}
Books = Literal["tuning", "reported"]
"""Half of the validation books: see `books.py`."""


@dataclass(frozen=True, kw_only=True)
class WidthRun(Study):
    """A run of this study: three validation books, and rates that follow the width."""

    books: Books = "reported"

    @property
    def dim(self) -> int:
        assert self.shape.dim is not None
        return self.shape.dim

    @property
    def core_hours(self) -> float:
        """Estimate."""
        return HOURS[self.dim] * self.tokens / tokens_of(self.dim, TOKENS_PER_WEIGHT)

    @property
    def fewer_bytes(self) -> float:
        """Bytes of D's messages over those of this run."""
        return nbytes_per_token(BF16, message_size(self.dim)) / self.nbytes_per_token

    def config(self, data: Path, folder: Path) -> RunConfig:
        """`data` is a folder made by `split_books`."""
        config = super().config(data / self.books, folder)
        return replace(
            config,
            optimizer=replace(config.optimizer, matrix_lr_factor=BASE_WIDTH / self.dim),
            checkpoint=CheckpointConfig(interval=100, keep_latest_k=1),
            validation=ValidationConfig(freq=-(-self.steps // 4), steps=0),
        )


def block_weights(dim: int) -> int:
    """Entries of all matrices in the blocks of D: 3 d² of attention and 8.25 d² of the MLP in each block."""
    return BLOCKS * 45 * dim * dim // 4


def tokens_of(dim: int, per_weight: int) -> int:
    return per_weight * block_weights(dim)


def shape_of(dim: int) -> ModelSettings:
    """The shape of D: heads of width 16, half as many key/value heads, an MLP of 2.75 d."""
    return replace(SHAPE, dim=dim, n_layers=BLOCKS, n_heads=dim // 16, n_kv_heads=dim // 32, hidden_dim=11 * dim // 4)


def message_size(width: int) -> MessageSize:
    return MessageSize(batch=MICROBATCH, tokens=SEQ_LEN, width=width, vocab_size=VOCABULARY)


def channels(dim: int, ratio: int) -> int:
    """Channels of a keel with at least `ratio` times fewer bytes than dense bf16 at this width."""
    return int4_channels(message_size(dim), ratio)


def study(model: Model, dim: int, *, lr: float, seed: int = 0, boundaries: int = 3) -> WidthRun:
    """A run of the model at 20 tokens per block weight."""
    tokens = tokens_of(dim, TOKENS_PER_WEIGHT)
    dense = WidthRun(
        question="width" if boundaries == 3 else "boundaries",
        name=f"{model}, d = {dim}"
        + ("" if boundaries == 3 else f", {boundaries} {'boundary' if boundaries == 1 else 'boundaries'}"),
        kind=model,
        priority=10 * (1 + WIDTHS.index(dim)) + seed,
        tokens=tokens,
        lr=lr,
        seed=seed,
        cuts=CUTS[boundaries],
        shape=shape_of(dim),
        microbatch=MICROBATCH,
        seq_len=SEQ_LEN,
        schedule=_wsd(tokens),
        compiled=True,
        autocast=False,
    )
    if model == "D":
        return dense
    width = dim if model == "D+" else channels(dim, 16 if model == "K16" else 32)
    boundary = BF16 if model == "D+" else INT4
    return replace(dense, projection=_dealt(width, dim, boundaries), boundary=boundary, matched=True)


def _wsd(tokens: int) -> LRSchedulerConfig:
    steps = tokens // (MICROBATCH * SEQ_LEN)
    return LRSchedulerConfig(warmup_steps=steps // 20, decay_type="wsd", decay_ratio=0.2)


def _dealt(width: int, dim: int, boundaries: int) -> ProjectionConfig:
    """A keel; the rank of one dense token table is dealt out to the segments."""
    rank = dim // (boundaries + 1)
    return ProjectionConfig(width=width, token_prior_rank=rank, token_prior_window=WINDOW, embedding_rank=rank)


def tuning_run(model: Model, lr: float) -> WidthRun:
    tokens = tokens_of(BASE_WIDTH, TUNING_TOKENS_PER_WEIGHT)
    whole = study(model, BASE_WIDTH, lr=lr)
    return replace(whole, question="learning rate", books="tuning", priority=0, tokens=tokens, schedule=_wsd(tokens))


def tuning(output: Path) -> Iterator[WidthRun]:
    """Three rates for each model, and the next one beyond while the best so far is at the edge."""
    for model in dict.fromkeys(TUNED_LIKE.values()):
        yield from (tuning_run(model, lr) for lr in RATES)
        losses = tuned_losses(model, output)
        if losses.keys() >= set(RATES):
            best = min(RATES, key=losses.__getitem__)
            for edge, beyond in zip((RATES[0], RATES[-1]), MORE_RATES, strict=True):
                if best == edge:
                    yield tuning_run(model, beyond)


def tuned_losses(model: Model, output: Path) -> dict[float, float]:
    """Learning rate -> loss on the tuning books, of finished tuning runs; infinite where a run diverged."""
    losses = {}
    for lr in (*RATES, *MORE_RATES):
        run = tuning_run(model, lr)
        if is_done(run, output):
            losses[lr] = loss_of(run, output)
    return losses


def best_rate(model: Model, output: Path) -> float:
    """Rate with the lowest loss on the tuning books; the middle one before any tuning run has finished."""
    losses = tuned_losses(TUNED_LIKE[model], output)
    return min(losses, key=losses.__getitem__) if losses else RATES[1]


def loss_of(run: Study, output: Path) -> float:
    """Last validation loss of a run that has a record."""
    record = json.loads(result_path(run, output).read_text())
    return record["validations"][-1]["loss"] if record["ended"] == "finished" else float("inf")


def width_runs(output: Path) -> Iterator[WidthRun]:
    rates = {model: best_rate(model, output) for model in MODELS}
    for dim, seeds in SEEDS.items():
        yield from (study(model, dim, lr=rates[model], seed=seed) for seed in seeds for model in MODELS)


def boundary_runs(output: Path) -> Iterator[WidthRun]:
    """K32 and D+ with 1 and with 7 boundaries; those with 3 are among the runs of the width."""
    models: tuple[Model, ...] = ("D+", "K32")
    rates = {model: best_rate(model, output) for model in models}
    for seed in SEEDS[BASE_WIDTH]:
        for boundaries in (1, 7):
            for model in models:
                yield study(model, BASE_WIDTH, lr=rates[model], seed=seed, boundaries=boundaries)


def share_run(seed: int, lr: float) -> WidthRun:
    """The narrowest keel with K32's share of channels at the largest width, because K32's own share grows with d."""
    width = channels(WIDTHS[-1], 32) * BASE_WIDTH // WIDTHS[-1]
    return replace(
        study("K32", BASE_WIDTH, lr=lr, seed=seed),
        question="equal share",
        name=f"keel of {width} channels, d = {BASE_WIDTH}",
        projection=_dealt(width, BASE_WIDTH, 3),
    )


def other_methods(output: Path) -> Iterator[WidthRun]:
    """A subspace with the bytes of K16, and D with messages of rotated int4; the rate of D, one seed."""
    dense = replace(study("D", BASE_WIDTH, lr=best_rate("D", output)), question="other methods")
    width = channels(BASE_WIDTH, 16)
    yield replace(
        dense, name=f"subspace of {width}, d = {BASE_WIDTH}", kind="row", width=width, boundary=INT4, matched=True
    )
    yield replace(dense, name=f"D in rotated int4, d = {BASE_WIDTH}", boundary=ROTATED_INT4)


def all_runs(output: Path) -> list[WidthRun]:
    """The whole list by priority, at the rates that the records in `output` show to be best: tuning, then by width."""
    share = (share_run(seed, best_rate("K32", output)) for seed in SEEDS[BASE_WIDTH])
    runs = [*tuning(output), *width_runs(output), *boundary_runs(output), *share, *other_methods(output)]
    assert len({run.key for run in runs}) == len(runs), "two runs have one name"
    return sorted(runs, key=lambda run: run.priority)
