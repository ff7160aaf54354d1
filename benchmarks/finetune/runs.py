"""Which runs the study has: one pretraining, then the same fine-tuning with one boundary method after the other.

All fine-tunings share the pretrained weights, the learning rate (`LR`; the first runs try others without compression)
and, seed by seed, the order of the data. As in the paper, top-k takes the largest numbers of a sample, and quantisation
spans the range of a sample. A direction that is not compressed crosses in bf16. TopK of both directions, with a
memory or without, comes in two ways: gradients have a mask and a memory of their own, or cross at the places of their
states and without memory. AQ-SGD remembers states alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from benchmarks.lossy_claims import MASKS, Masks
from benchmarks.lossy_claims import Feedback as Name
from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.run import (
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelSettings,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)

DIM, VOCABULARY, SEQ_LEN = 128, 4096, 128
MODEL = ModelSettings(preset="gpt2-tiny", dim=DIM, n_layers=6, n_heads=2, max_seq_len=SEQ_LEN, boundaries=(1, 3, 5))
BOOKS, EPOCHS, SAMPLES, VALIDATION_SAMPLES, BATCH = 2, 4, 256, 128, 8
PRETRAINING_TOKENS, PRETRAINING_BATCH = 2_621_440, 16
PRETRAINED, BOOKS_FOLDER = "pretrained", "books"
"""Beside the folders of the runs: the weights that every fine-tuning starts from, and what it learns."""
LR, SEEDS = 1e-3, (0, 1, 2)
TOKENS_PER_CORE_SECOND, SECONDS_BESIDE = 6_000.0, 10.0
"""Roughly, for the estimate of core-minutes: in training, and a run's start and validations."""

Feedback = Literal["none", "ef", "ef21", "aqsgd"]
FEEDBACK_SETTINGS: dict[Name, Feedback] = {"EF": "ef", "EF21": "ef21", "AQ-SGD": "aqsgd"}
FEEDBACKS: tuple[Name, ...] = ("EF", "EF21")
KEPT = (0.5, 0.3, 0.2, 0.1, 0.05)
KEPT_WITH: dict[Name, tuple[float, ...]] = {"EF": (0.1,), "EF21": (0.1,), "AQ-SGD": KEPT[:-1]}
UNCOMPRESSED = BoundaryConfig(forward="bf16", backward="bf16")
SAME_MASK = CompressionConfig(kind="topk", reuse_mask=True)


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """The same model, cut at the same places, with nothing compressed."""

    key: str = "pretraining"
    tokens: int = PRETRAINING_TOKENS
    lr: float = 3e-3
    trunk: ClassVar[None] = None

    @property
    def steps(self) -> int:
        return self.tokens // (PRETRAINING_BATCH * SEQ_LEN)

    def config(self, data: Path, folder: Path) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=folder),
            model=MODEL,
            data=DataConfig(path=data),
            training=TrainingConfig(
                steps=self.steps, global_batch_size=PRETRAINING_BATCH, seq_len=SEQ_LEN, precision="bf16-mixed"
            ),
            optimizer=OptimizerConfig(lr=self.lr),
            lr_scheduler=LRSchedulerConfig(warmup_steps=self.steps // 20),
            checkpoint=CheckpointConfig(interval=256, keep_latest_k=1),
            validation=ValidationConfig(freq=self.steps // 4, steps=10),
            metrics=MetricsConfig(log_freq=64),
        )


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    name: str
    """Of its boundary method; runs that differ in the seed alone share it."""
    boundary: BoundaryConfig
    seed: int = 0
    lr: float = LR
    trunk: ClassVar[None] = None

    @property
    def key(self) -> str:
        words = f"{self.name} lr {self.lr:g} seed {self.seed}".replace("%", "pc")
        return "".join(c if c.isalnum() or c in ".-+" else "_" for c in words)

    @property
    def steps(self) -> int:
        return EPOCHS * SAMPLES // BATCH

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * SEQ_LEN

    def config(self, data: Path, folder: Path) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=folder),
            model=ModelSettings(initial=folder.parent / PRETRAINED),
            data=DataConfig(path=data),
            training=TrainingConfig(steps=self.steps, global_batch_size=BATCH, seq_len=SEQ_LEN, precision="bf16-mixed"),
            optimizer=OptimizerConfig(lr=self.lr),
            lr_scheduler=LRSchedulerConfig(warmup_steps=self.steps // 20),
            boundary=self.boundary,
            checkpoint=CheckpointConfig(interval=self.steps, keep_latest_k=1),
            validation=ValidationConfig(freq=self.steps // EPOCHS, steps=0),
            metrics=MetricsConfig(log_freq=64),
            debug=DebugConfig(seed=self.seed),
        )

    @property
    def forward_nbytes(self) -> float:
        """A token at each boundary, ids included, as the method states it; the same in every epoch."""
        return forward_and_backward(self.boundary)[0]

    @property
    def backward_nbytes(self) -> float:
        return forward_and_backward(self.boundary)[1]

    @property
    def paper_forward_nbytes(self) -> float:
        """The mean over all epochs if AQ-SGD sent its first one whole, as its paper does, and not C(x) as here."""
        if self.boundary.states.feedback != "aqsgd":
            return self.forward_nbytes
        whole = forward_and_backward(UNCOMPRESSED)[0]
        return (whole + (EPOCHS - 1) * self.forward_nbytes) / EPOCHS


def forward_and_backward(boundary: BoundaryConfig) -> tuple[float, float]:
    shape = MessageShape(batch=BATCH, tokens=SEQ_LEN, width=DIM, vocab_size=VOCABULARY, dtype=torch.float32)
    method = make_method(boundary, shape, in_subspace=False, seed=0)
    return method.forward_nbytes / shape.rows, method.backward_nbytes / shape.rows


def topk(keep: float, feedback: Feedback = "none") -> CompressionConfig:
    return CompressionConfig(kind="topk", keep=keep, feedback=feedback)


def quantise(bits: int, feedback: Feedback = "none") -> CompressionConfig:
    return CompressionConfig(kind="quantise", bits=bits, feedback=feedback)


def states_only(compression: CompressionConfig) -> BoundaryConfig:
    return BoundaryConfig(states=compression, backward="bf16")


def gradients_only(compression: CompressionConfig) -> BoundaryConfig:
    return BoundaryConfig(forward="bf16", gradients=compression)


def both(states: CompressionConfig, gradients: CompressionConfig) -> BoundaryConfig:
    return BoundaryConfig(states=states, gradients=gradients)


def topk_both(keep: float, masks: Masks, feedback: Feedback = "none") -> BoundaryConfig:
    if masks == "mask reused":
        return both(topk(keep, feedback), SAME_MASK)
    return both(topk(keep, feedback), topk(keep, "none" if feedback == "aqsgd" else feedback))


def topk_name(keep: float, masks: Masks, feedback: Name | None = None) -> str:
    return f"topk {keep:.0%} {feedback or 'both'}, {masks}"


def methods() -> Iterator[tuple[str, BoundaryConfig]]:
    """Those with which something is compared first."""
    yield "uncompressed", UNCOMPRESSED
    for keep in KEPT:
        for masks in MASKS:
            yield topk_name(keep, masks), topk_both(keep, masks)
        yield f"topk {keep:.0%} states", states_only(topk(keep))
        yield f"topk {keep:.0%} gradients", gradients_only(topk(keep))
    for bits in (2, 4, 8):
        yield f"quantise {bits} bit states", states_only(quantise(bits))
        yield f"quantise {bits} bit gradients", gradients_only(quantise(bits))
        yield f"quantise {bits} bit both", both(quantise(bits), quantise(bits))
    for feedback, kept in KEPT_WITH.items():
        for keep in kept:
            for masks in MASKS:
                yield topk_name(keep, masks, feedback), topk_both(keep, masks, FEEDBACK_SETTINGS[feedback])
    for bits in (2, 4):
        yield f"quantise {bits} bit AQ-SGD", both(quantise(bits, "aqsgd"), quantise(8))


METHODS = dict(methods())

DIRECTIONS = ("topk 10%", "quantise 2 bit", "quantise 4 bit")
RESTED_ON = (
    "uncompressed",
    *(topk_name(keep, masks) for keep in KEPT for masks in MASKS),
    *(f"{what} {direction}" for what in DIRECTIONS for direction in ("states", "gradients")),
    *(topk_name(0.1, masks, feedback) for feedback in FEEDBACKS for masks in MASKS),
    *(topk_name(keep, masks, "AQ-SGD") for keep in (0.3, 0.2) for masks in MASKS),
)
"""The claims are decided from these, which is why they have several seeds."""


def runs() -> Iterator[Finetuning]:
    """Everything with the first seed, then the claims with the others."""
    whole = Finetuning(name="uncompressed", boundary=UNCOMPRESSED)
    for lr in (LR / 3, LR * 3):
        yield replace(whole, name="learning rate", lr=lr)
    for name, boundary in METHODS.items():
        yield replace(whole, name=name, boundary=boundary)
    for seed in SEEDS[1:]:
        for name in RESTED_ON:
            yield replace(whole, name=name, boundary=METHODS[name], seed=seed)


RUNS = list(runs())
assert len({run.key for run in RUNS}) == len(RUNS), "two runs have one name"


def core_minutes(run: Finetuning | Pretraining) -> float:
    return (run.tokens / TOKENS_PER_CORE_SECOND + SECONDS_BESIDE) / 60
