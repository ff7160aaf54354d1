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
from benchmarks.lossy_claims import Memory as Name
from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.settings import BoundarySection, Compression
from thinpipe.models.config import Execution
from thinpipe.train.config import (
    CheckpointSection,
    DataSection,
    DebugSection,
    JobSection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    SchedulerSection,
    TrainingSection,
    ValidationSection,
)

DIM, VOCABULARY, SEQ_LEN = 128, 4096, 128
MODEL = ModelSection(preset="gpt2-tiny", dim=DIM, n_layers=6, n_heads=2, max_seq_len=SEQ_LEN, boundaries=(1, 3, 5))
BOOKS, EPOCHS, SAMPLES, VALIDATION_SAMPLES, BATCH = 2, 4, 256, 128, 8
PRETRAINING_TOKENS, PRETRAINING_BATCH = 2_621_440, 16
PRETRAINED, BOOKS_FOLDER = "pretrained", "books"
"""Beside the folders of the runs: the weights that every fine-tuning starts from, and what it learns."""
LR, SEEDS = 1e-3, (0, 1, 2)
TOKENS_PER_CORE_SECOND, SECONDS_BESIDE = 6_000.0, 10.0
"""Roughly, for the estimate of core-minutes: in training, and a run's start and validations."""

Memory = Literal["none", "ef", "ef21", "aqsgd"]
MEMORIES: dict[Name, Memory] = {"EF": "ef", "EF21": "ef21", "AQ-SGD": "aqsgd"}
FEEDBACKS: tuple[Name, ...] = ("EF", "EF21")
KEPT = (0.5, 0.3, 0.2, 0.1, 0.05)
KEPT_WITH: dict[Name, tuple[float, ...]] = {"EF": (0.1,), "EF21": (0.1,), "AQ-SGD": KEPT[:-1]}
UNCOMPRESSED = BoundarySection(forward="bf16", backward="bf16")
SAME_MASK = Compression(kind="topk", reuse_mask=True)


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
            job=JobSection(dump_folder=folder),
            model=MODEL,
            data=DataSection(path=data),
            training=TrainingSection(steps=self.steps, global_batch_size=PRETRAINING_BATCH, seq_len=SEQ_LEN),
            optimizer=OptimizerSection(lr=self.lr),
            lr_scheduler=SchedulerSection(warmup_steps=self.steps // 20),
            execution=Execution(autocast_bf16=True),
            checkpoint=CheckpointSection(interval=256, keep_latest_k=1),
            validation=ValidationSection(freq=self.steps // 4, steps=10),
            metrics=MetricsSection(log_freq=64),
        )


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    name: str
    """Of its boundary method; runs that differ in the seed alone share it."""
    boundary: BoundarySection
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
            job=JobSection(dump_folder=folder),
            model=ModelSection(initial=folder.parent / PRETRAINED),
            data=DataSection(path=data),
            training=TrainingSection(steps=self.steps, global_batch_size=BATCH, seq_len=SEQ_LEN),
            optimizer=OptimizerSection(lr=self.lr),
            lr_scheduler=SchedulerSection(warmup_steps=self.steps // 20),
            boundary=self.boundary,
            execution=Execution(autocast_bf16=True),
            checkpoint=CheckpointSection(interval=self.steps, keep_latest_k=1),
            validation=ValidationSection(freq=self.steps // EPOCHS, steps=0),
            metrics=MetricsSection(log_freq=64),
            debug=DebugSection(seed=self.seed),
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
        if self.boundary.states.memory != "aqsgd":
            return self.forward_nbytes
        whole = forward_and_backward(UNCOMPRESSED)[0]
        return (whole + (EPOCHS - 1) * self.forward_nbytes) / EPOCHS


def forward_and_backward(boundary: BoundarySection) -> tuple[float, float]:
    shape = MessageShape(batch=BATCH, tokens=SEQ_LEN, width=DIM, vocab_size=VOCABULARY, dtype=torch.float32)
    method = make_method(boundary, shape, confined=False, seed=0)
    return method.forward_nbytes / shape.rows, method.backward_nbytes / shape.rows


def topk(keep: float, memory: Memory = "none") -> Compression:
    return Compression(kind="topk", keep=keep, memory=memory)


def quantise(bits: int, memory: Memory = "none") -> Compression:
    return Compression(kind="quantise", bits=bits, memory=memory)


def states_only(leg: Compression) -> BoundarySection:
    return BoundarySection(states=leg, backward="bf16")


def gradients_only(leg: Compression) -> BoundarySection:
    return BoundarySection(forward="bf16", gradients=leg)


def both(states: Compression, gradients: Compression) -> BoundarySection:
    return BoundarySection(states=states, gradients=gradients)


def topk_both(keep: float, masks: Masks, memory: Memory = "none") -> BoundarySection:
    if masks == "mask reused":
        return both(topk(keep, memory), SAME_MASK)
    return both(topk(keep, memory), topk(keep, "none" if memory == "aqsgd" else memory))


def topk_name(keep: float, masks: Masks, memory: Name | None = None) -> str:
    return f"topk {keep:.0%} {memory or 'both'}, {masks}"


def methods() -> Iterator[tuple[str, BoundarySection]]:
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
    for memory, kept in KEPT_WITH.items():
        for keep in kept:
            for masks in MASKS:
                yield topk_name(keep, masks, memory), topk_both(keep, masks, MEMORIES[memory])
    for bits in (2, 4):
        yield f"quantise {bits} bit AQ-SGD", both(quantise(bits, "aqsgd"), quantise(8))


METHODS = dict(methods())

DIRECTIONS = ("topk 10%", "quantise 2 bit", "quantise 4 bit")
RESTED_ON = (
    "uncompressed",
    *(topk_name(keep, masks) for keep in KEPT for masks in MASKS),
    *(f"{what} {direction}" for what in DIRECTIONS for direction in ("states", "gradients")),
    *(topk_name(0.1, masks, memory) for memory in FEEDBACKS for masks in MASKS),
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
