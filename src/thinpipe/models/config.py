"""What a model is, in numbers. Part of every checkpoint. No torch here, so that planning can read it at once."""

import itertools
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SubspaceConfig:
    """How the residual stream is confined."""

    width: int | None = None
    """Numbers per token that cross a boundary (k). None: an ordinary dense model."""
    fixed: Literal["signs", "gaussian", "given"] = "signs"
    """The frozen token table: random signs (1 bit an entry), a Gaussian table (32 bits, shipped with the model), or
    one that is given with the weights: what a model cast from a dense one has."""
    fixed_std: float = 0.02
    """Standard deviation of the frozen table's entries."""
    free_last: bool = True
    """Blocks after the last boundary write to all of R^D. Moving the last boundary then changes the model."""
    seed: int = 0
    """Of the basis and the frozen tables: the same for all segments of a model."""


@dataclass(frozen=True, kw_only=True)
class NeckConfig:
    """How few numbers cross a boundary while blocks write to all of R^D: the rest is a segment's own scratch."""

    width: int | None = None
    """Numbers per token that cross a boundary (k). None: the stream has no neck."""
    kind: Literal["keel", "learned", "bottleneck"] = "keel"
    """keel: the first k channels of the stream run through the whole model. learned: an orthonormal projector on
    either side of each boundary, trained on the Stiefel manifold. bottleneck: the first k channels, and small networks
    that add to them what they make of all channels, and to all channels what they make of the message."""
    anchor_rank: int = 0
    """Segments after a boundary start from a trainable vector of each token, of this rank. 0: the message alone."""
    anchor_reach: int = 1
    """Of each token and of so many before it, this one counted: what another segment's attention would tell."""
    first_rank: int = 0
    """And the first segment from one of this rank, so that the one table of an ordinary model is dealt out to all
    segments: with dim / segments for both, all tables together are as large as that one. 0: a full table."""
    ngram_rows: int = 0
    """And from one of each pair of tokens, which share so many rows by their hashes. 0: no pairs."""
    ngram_rank: int = 32
    """Of these."""
    hidden: int | None = None
    """bottleneck: width of the small networks. None: 2 k."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Fields that every family shares."""

    family: ClassVar[str]
    """The name under which a checkpoint knows this kind of model."""
    has_position_table: ClassVar[bool] = False
    """Positions are added to the stream, so a subspace model needs a frozen table of them as well."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    max_seq_len: int
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of initial weights; writers get init_std / sqrt(2 n_layers)."""
    tied: bool = False
    """The head is the embedding. Dense, uncut models only: a tie across a cut would send V x D gradients every step."""
    boundaries: tuple[int, ...] = ()
    """Cuts: (2, 4) makes the segments blocks 0-1, 2-3 and 4 to the end."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    neck: NeckConfig = field(default_factory=NeckConfig)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dim % self.n_heads:
            raise UserError(f"dim {self.dim} is not a multiple of n_heads {self.n_heads}")
        edges = (0, *self.boundaries, self.n_layers)
        if any(left >= right for left, right in itertools.pairwise(edges)):
            raise UserError(
                f"boundaries {list(self.boundaries)} must rise strictly between 1 and {self.n_layers - 1}, "
                f"so that each of the {len(edges) - 1} segments has at least one of the {self.n_layers} blocks"
            )
        if self.tied and self.boundaries:
            raise UserError("a tied model cannot be cut: set tied = false, or leave boundaries empty")
        self._check_neck()
        width = self.subspace.width
        if width is None:
            return
        if not 1 <= width <= self.dim:
            raise UserError(f"subspace.width {width} must lie between 1 and dim {self.dim}")
        if self.tied:
            raise UserError("a subspace model cannot be tied: the head would need the frozen table. Set tied = false")
        if self.subspace.free_last and not self.boundaries:
            raise UserError(
                "subspace.free_last frees the blocks after the last boundary, but there is no boundary: "
                "set boundaries, or subspace.free_last = false to confine every block"
            )

    def _check_neck(self) -> None:
        neck = self.neck
        if neck.width is None:
            if neck != NeckConfig():
                raise UserError("neck has settings but no width: set neck.width, or leave them out")
            return
        if not 1 <= neck.width <= self.dim:
            raise UserError(f"neck.width {neck.width} must lie between 1 and dim {self.dim}")
        if self.subspace.width is not None:
            raise UserError("blocks are confined (subspace.width) or free with a neck (neck.width): set one of them")
        if not self.boundaries:
            raise UserError("neck.width is of boundaries, and there is none: set boundaries")
        most = {"anchor_rank": (0, self.dim), "first_rank": (0, self.dim), "anchor_reach": (1, self.max_seq_len)}
        for name, (low, high) in (most | {"ngram_rows": (0, 1 << 31), "ngram_rank": (1, self.dim)}).items():
            if not low <= getattr(neck, name) <= high:
                raise UserError(f"neck.{name} must lie between {low} and {high}, not at {getattr(neck, name)}")
        if neck.anchor_reach > 1 and not neck.anchor_rank:
            raise UserError(
                "neck.anchor_reach is of anchors, and there are none: set neck.anchor_rank, or leave it out"
            )
        if neck.ngram_rank != NeckConfig.ngram_rank and not neck.ngram_rows:
            raise UserError("neck.ngram_rank is of pairs, and there are none: set neck.ngram_rows, or leave it out")
        if neck.first_rank and self.has_position_table:
            raise UserError(f"neck.first_rank would cut down the positions of {self.family}, too: leave it out")
        if neck.hidden is not None and (neck.kind != "bottleneck" or neck.hidden < 1):
            raise UserError('neck.hidden is for kind = "bottleneck", and at least 1')

    @property
    def has_neck(self) -> bool:
        return self.neck.width is not None

    @property
    def state_width(self) -> int:
        """Numbers per token that cross a boundary."""
        return self.neck.width or self.subspace.width or self.dim

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def segments(self) -> tuple[range, ...]:
        """The blocks of each segment."""
        edges = (0, *self.boundaries, self.n_layers)
        return tuple(range(left, right) for left, right in itertools.pairwise(edges))

    @property
    def first_free_block(self) -> int:
        """Blocks from this one on write to all of R^D."""
        if self.subspace.width is None:
            return 0
        return self.boundaries[-1] if self.subspace.free_last else self.n_layers


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of low rotary frequencies, with the names of its published configuration."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"rope_scaling.low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama 2/3 decoder."""

    family: ClassVar[str] = "llama"

    n_kv_heads: int
    hidden_dim: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads < 1 or self.hidden_dim < 1:
            raise UserError(f"n_kv_heads {self.n_kv_heads} and hidden_dim {self.hidden_dim} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not dim / n_heads = {self.head_dim}")


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2: learned positions, LayerNorm, biases; the MLP is four times as wide as the model."""

    family: ClassVar[str] = "gpt2"
    has_position_table: ClassVar[bool] = True

    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout {self.dropout} must be at least 0 and below 1")

    @property
    def hidden_dim(self) -> int:
        return 4 * self.dim


CONFIGS: dict[str, type[ModelConfig]] = {config.family: config for config in (LlamaConfig, GPT2Config)}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a segment runs; never what it computes."""

    checkpoint_activations: bool = False
    """Keep only what enters each block and compute it again in the backward pass: less memory, a third more time."""
    autocast_bf16: bool = False
    """Matrix products in bfloat16; parameters and the state that crosses boundaries keep their dtype."""
    compile: bool = False
    """torch.compile, a block at a time."""
