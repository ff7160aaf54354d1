"""The models that are compared: dense, subspace of the same shape, subspace with as many trainable numbers.

A subspace writer is d/k times smaller, so at the same shape the subspace model has fewer trainable numbers. The second
comparison gives them back as a wider MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.step.config import HEAD_DIM, StepConfig
from thinpipe.core.errors import UserError
from thinpipe.models import LlamaConfig, SubspaceConfig, build

COUNT_TOLERANCE = 0.01
"""How far apart two "equal" trainable counts may be."""

Match = Literal["shape", "count"]
"""What a subspace variant has in common with the dense model."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model, in numbers that fit on a command line."""

    dim: int
    layers: int
    vocab: int
    max_seq_len: int
    hidden_dim: int
    width: int | None = None
    """k; None for the dense model."""
    match: Match = "shape"

    @property
    def name(self) -> str:
        return "dense" if self.width is None else f"subspace k={self.width}, same {self.match}"

    @property
    def model_config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            dim=self.dim,
            n_layers=self.layers,
            n_heads=self.dim // HEAD_DIM,
            n_kv_heads=self.dim // HEAD_DIM,
            hidden_dim=self.hidden_dim,
            max_seq_len=self.max_seq_len,
            subspace=SubspaceConfig(width=self.width, free_last=False),
        )

    @property
    def trainable(self) -> int:
        """Trainable numbers; the basis and the frozen table are not among them."""
        return sum(parameter.numel() for parameter in build(self.model_config).parameters())


def dense_variant(config: StepConfig) -> Variant:
    """Llama's rule for the MLP: 8/3 d, rounded up to a multiple of 256."""
    hidden_dim = -(-8 * config.dim // (3 * 256)) * 256
    return Variant(
        dim=config.dim,
        layers=config.layers,
        vocab=config.vocab,
        max_seq_len=max(config.seqs),
        hidden_dim=hidden_dim,
    )


def subspace_variants(config: StepConfig) -> Iterator[Variant]:
    """For every width, first at the dense model's shape and then at its trainable count."""
    dense = dense_variant(config)
    for compression in config.compressions:
        same_shape = replace(dense, width=config.width(compression))
        yield same_shape
        yield with_count(same_shape, dense.trainable)


def with_count(variant: Variant, trainable: int) -> Variant:
    """The variant with the MLP width, a multiple of 8, that brings its trainable count closest to this one."""
    per_8 = replace(variant, hidden_dim=variant.hidden_dim + 8).trainable - variant.trainable
    added_8s = round((trainable - variant.trainable) / per_8)
    matched = replace(variant, hidden_dim=variant.hidden_dim + 8 * added_8s, match="count")
    if abs(matched.trainable / trainable - 1) > COUNT_TOLERANCE:
        raise UserError(
            f"no multiple of 8 as MLP width brings {variant.name} within {COUNT_TOLERANCE:.0%} of {trainable:,} "
            f"trainable numbers (the nearest has {matched.trainable:,}): use a larger dim or vocab"
        )
    return matched
