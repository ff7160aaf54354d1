"""Model configurations: what all families share. Sizes, boundaries, compression at boundaries. Saved with every
checkpoint. The configuration of a family is in `config/families`.

Imports no torch, so that `thinpipe plan` starts quickly.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from thinpipe.config.model_family import FamilySpec
from thinpipe.config.segments import refuse_wrong_boundaries, segments_between
from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SubspaceConfig:
    """Subspace model (arXiv 2506.01260): the residual stream is confined to a k-dimensional subspace of R^D, plus a
    frozen vector per token."""

    width: int | None = None
    """Dimension k of the subspace: numbers per token in a boundary message. None: an ordinary dense model."""
    fixed: Literal["signs", "gaussian", "given"] = "signs"
    """Frozen token table. signs: random signs, 1 bit per entry, recomputed from the seed. gaussian: float32 entries,
    saved with the model. given: a table that comes with the weights, as in a model converted by `thinpipe import`."""
    fixed_std: float = 0.02
    """Standard deviation of the frozen table's entries."""
    free_last: bool = True
    """Whether blocks after the last boundary write to all of R^D instead of the subspace. If true, moving the last
    boundary changes the model."""
    seed: int = 0
    """Random seed of the initial basis and of the frozen tables, shared by all segments of a model."""


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """Boundary projection: blocks read and write all D channels of the residual stream, but only k numbers per token
    cross a boundary. The next segment rebuilds a D-wide stream from the message and from the token ids."""

    width: int | None = None
    """Numbers per token in a boundary message (k). None: no boundary projection."""
    kind: Literal["keel", "learned", "bottleneck"] = "keel"
    """keel: the first k channels of the stream cross every boundary unchanged. learned: an orthonormal projector on
    each side of a boundary, trained on the Stiefel manifold. bottleneck: the first k channels, plus a small MLP on each
    side: before the boundary from all D channels to the message, after it from the message to all D channels."""
    token_prior_rank: int = 0
    """Rank of the token prior: a trainable low-rank embedding that every segment but the first adds to its input
    stream, computed from the token ids. 0: no token prior."""
    token_prior_window: int = 1
    """Tokens that the token prior of a position reads: the token at that position and the window - 1 tokens before
    it."""
    embedding_rank: int = 0
    """Rank of the first segment's token embedding; 0: full rank. With dim / segments for this and token_prior_rank,
    the token tables of all segments together are as large as one full embedding."""
    bigram_rows: int = 0
    """Rows of the bigram table of the token prior: a trainable vector for each pair of adjacent tokens, with pairs
    hashed to rows. 0: no bigram table."""
    bigram_rank: int = 32
    """Rank of the bigram table."""
    hidden: int | None = None
    """bottleneck only: hidden width of the MLPs. None: 2 k."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model configuration: the fields that all model families share."""

    spec: ClassVar[FamilySpec]
    """Layers of the family, their names and kinds."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    max_seq_len: int
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of initial weights; layers that write to the residual stream get
    init_std / sqrt(2 n_layers)."""
    tied: bool = False
    """Whether the output head shares the embedding's weights. Only for dense models without boundaries: tied weights
    in two segments would need V x D gradients exchanged every step."""
    boundaries: tuple[int, ...] = ()
    """Block indices at which the model is cut: (2, 4) makes the segments blocks 0-1, 2-3 and 4 to the end."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dim % self.n_heads:
            raise UserError(f"dim {self.dim} is not a multiple of n_heads {self.n_heads}")
        if self.spec.rotary is not None and self.head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not dim / n_heads = {self.head_dim}")
        refuse_wrong_boundaries(self.boundaries, self.n_layers)
        if self.tied and self.boundaries:
            raise UserError("a tied model cannot be cut: set tied = false, or leave boundaries empty")
        self._check_projection()
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

    def _check_projection(self) -> None:
        projection = self.projection
        if projection.width is None:
            if projection != ProjectionConfig():
                raise UserError("projection has settings but no width: set projection.width, or leave them out")
            return
        if not 1 <= projection.width <= self.dim:
            raise UserError(f"projection.width {projection.width} must lie between 1 and dim {self.dim}")
        if self.subspace.width is not None:
            raise UserError(
                "blocks are confined (subspace.width) or free with a boundary projection (projection.width): set one "
                "of them"
            )
        if not self.boundaries:
            raise UserError("projection.width is of boundaries, and there is none: set boundaries")
        bounds = {
            "token_prior_rank": (0, self.dim),
            "embedding_rank": (0, self.dim),
            "token_prior_window": (1, self.max_seq_len),
        }
        for name, (low, high) in (bounds | {"bigram_rows": (0, 1 << 31), "bigram_rank": (1, self.dim)}).items():
            if not low <= getattr(projection, name) <= high:
                raise UserError(
                    f"projection.{name} must lie between {low} and {high}, not at {getattr(projection, name)}"
                )
        if projection.token_prior_window > 1 and not projection.token_prior_rank:
            raise UserError(
                "projection.token_prior_window is of the token prior, and there is none: set "
                "projection.token_prior_rank, or leave it out"
            )
        if projection.bigram_rank != ProjectionConfig.bigram_rank and not projection.bigram_rows:
            raise UserError(
                "projection.bigram_rank is of bigrams, and there are none: set projection.bigram_rows, or leave it out"
            )
        if projection.embedding_rank and self.has_position_table:
            raise UserError(
                f"projection.embedding_rank would cut down the positions of {self.family}, too: leave it out"
            )
        if projection.hidden is not None and (projection.kind != "bottleneck" or projection.hidden < 1):
            raise UserError('projection.hidden is for kind = "bottleneck", and at least 1')

    @classmethod
    def presets(cls) -> dict[str, "ModelConfig"]:
        """Sizes of the family by name, for `model.preset`."""
        return {}

    @property
    def family(self) -> str:
        """Name of the model family in checkpoints."""
        return self.spec.name

    @property
    def has_position_table(self) -> bool:
        """Whether position embeddings are added to the residual stream. A subspace model then needs a frozen table of
        positions too."""
        return self.spec.position_embedding is not None

    @property
    def has_projection(self) -> bool:
        return self.projection.width is not None

    @property
    def state_width(self) -> int:
        """Numbers per token in the state that a boundary message carries."""
        return self.projection.width or self.subspace.width or self.dim

    @property
    def in_subspace(self) -> bool:
        """Whether the states at boundaries are coordinates in the subspace."""
        return self.subspace.width is not None

    @property
    def segments_need_ids(self) -> bool:
        """Every segment of a model in a subspace, or with a token prior, has a table of the tokens. Those of other
        models get the ids too, so that messages of all our models have one form."""
        return True

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def segments(self) -> tuple[range, ...]:
        """Block indices of each segment."""
        return segments_between(self.boundaries, self.n_layers)

    @property
    def first_free_block(self) -> int:
        """Index of the first block that writes to all of R^D instead of the subspace; n_layers if there is none."""
        if self.subspace.width is None:
            return 0
        return self.boundaries[-1] if self.subspace.free_last else self.n_layers


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of low rotary frequencies, with the field names of its published configuration."""

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


CheckpointActivations = Literal["none", "block", "segment"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a segment executes: memory and speed. The model itself does not depend on it."""

    checkpoint_activations: CheckpointActivations = "none"
    """Activation checkpointing: keep only the input of each block, or of each segment, and recompute the rest in the
    backward pass. Less memory, about a third more compute time. block: one block is recomputed at a time. segment: a
    micro-batch in flight keeps only what the segment received, and a whole segment is recomputed at once, which takes
    less memory than block with more than about 25 micro-batches in flight. Head and loss are not recomputed."""
    compile: bool = False
    """Compile each block with torch.compile."""

    def __post_init__(self) -> None:
        choices = get_args(CheckpointActivations)
        if self.checkpoint_activations not in choices:
            raise UserError(
                f"execution.checkpoint_activations is {self.checkpoint_activations!r}: there are {', '.join(choices)}"
            )
