"""Trainable parameters of every segment by arithmetic, without torch: the shapes that `models/` builds.

`tests/plan/test_needs.py` compares both. A new model family adds its blocks and norms here.
"""

from dataclasses import dataclass, replace
from typing import Literal

from thinpipe.config.model import GPT2Config, LlamaConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor, as far as costs depend on it."""

    numel: int
    is_matmul: bool = False
    """True for a factor of a matrix product, which costs FLOPs."""
    is_table: bool = False
    """True for a lookup table (by token, bigram or position) and for the matrix that projects its rows up."""
    row_moments: int | None = None
    """For subspace coordinates: size of a second moment with one number per row. None: not in a subspace."""
    is_orthonormal: bool = False
    """True for a matrix on the Stiefel manifold, whose second moment is a single number."""
    is_tied: bool = False
    """True for a second use of a parameter that is counted elsewhere."""

    def second_moment(self, rule: Literal["row", "element"]) -> int:
        """Size of the optimiser's second moment."""
        if self.is_orthonormal:
            return 1
        return self.numel if self.row_moments is None or rule == "element" else self.row_moments


ParameterGroup = tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentShapes:
    """Parameters of a segment. All its blocks are alike; groups that the segment does not have are empty."""

    blocks: int
    """Number of blocks."""
    block: ParameterGroup
    """Parameters of one block."""
    first: ParameterGroup = ()
    """Embeddings of the first segment."""
    token_prior: ParameterGroup = ()
    up_projection: ParameterGroup = ()
    down_projection: ParameterGroup = ()
    last: ParameterGroup = ()
    """Final norm and head of the last segment."""

    @property
    def ends(self) -> ParameterGroup:
        """Everything outside of blocks."""
        return (*self.first, *self.token_prior, *self.up_projection, *self.down_projection, *self.last)

    @property
    def unique_parameters(self) -> ParameterGroup:
        """All parameters, tied ones counted once."""
        return tuple(each for each in (*self.ends, *self.block * self.blocks) if not each.is_tied)


def segment_shapes(model: ModelConfig) -> list[SegmentShapes]:
    shapes = []
    for index, indices in enumerate(model.segments):
        is_first, is_last = index == 0, index == len(model.segments) - 1
        has_projection = model.has_projection
        shapes.append(
            SegmentShapes(
                blocks=len(indices),
                block=_block(model, in_subspace=indices.start < model.first_free_block),
                first=_first(model) if is_first else (),
                token_prior=_token_prior(model) if has_projection and not is_first else (),
                up_projection=_projection(model, down=False) if has_projection and not is_first else (),
                down_projection=_projection(model, down=True) if has_projection and not is_last else (),
                last=(_norm(model), replace(_matrix(model.dim, model.vocab_size), is_tied=model.tied))
                if is_last
                else (),
            )
        )
    return shapes


def _matrix(inputs: int, outputs: int) -> Parameter:
    return Parameter(numel=inputs * outputs, is_matmul=True)


def _norm(model: ModelConfig) -> Parameter:
    """Scale, and for GPT-2 a bias."""
    return Parameter(numel=(2 if isinstance(model, GPT2Config) else 1) * model.dim)


def _block(model: ModelConfig, *, in_subspace: bool) -> ParameterGroup:
    norms = (_norm(model), _norm(model))
    if isinstance(model, LlamaConfig):
        keys = model.n_kv_heads * model.head_dim
        attention = (_matrix(model.dim, model.dim), _matrix(model.dim, keys), _matrix(model.dim, keys))
        mlp = (_matrix(model.dim, model.hidden_dim), _matrix(model.dim, model.hidden_dim))
        return norms + attention + mlp + _writers(model, model.hidden_dim, in_subspace=in_subspace)
    assert isinstance(model, GPT2Config), f"a plan does not know blocks of {model.family}"
    readers = (_matrix(model.dim, 3 * model.dim), _matrix(model.dim, model.hidden_dim))
    biases = Parameter(numel=3 * model.dim), Parameter(numel=model.hidden_dim)
    return norms + readers + biases + _writers(model, model.hidden_dim, in_subspace=in_subspace)


def _writers(model: ModelConfig, hidden: int, *, in_subspace: bool) -> ParameterGroup:
    """Output projections of attention and MLP, which write to the residual stream; with biases for GPT-2."""
    width = model.subspace.width if in_subspace else None
    matrices = tuple(
        replace(_matrix(inputs, width or model.dim), row_moments=None if width is None else inputs)
        for inputs in (model.dim, hidden)
    )
    bias = Parameter(numel=width or model.dim, row_moments=None if width is None else 1)
    return matrices + ((bias, bias) if isinstance(model, GPT2Config) else ())


def _first(model: ModelConfig) -> ParameterGroup:
    if model.projection.embedding_rank:
        return _factorized_embedding(model.vocab_size, model.projection.embedding_rank, model.dim)
    width = model.subspace.width
    rows = (model.vocab_size, model.max_seq_len) if model.has_position_table else (model.vocab_size,)
    return tuple(
        Parameter(numel=count * (width or model.dim), is_table=True, row_moments=None if width is None else count)
        for count in rows
    )


def _factorized_embedding(rows: int, rank: int, dim: int, window: int = 1) -> ParameterGroup:
    return Parameter(numel=rows * rank, is_table=True), replace(_matrix(rank * window, dim), is_table=True)


def _token_prior(model: ModelConfig) -> ParameterGroup:
    projection = model.projection
    tokens = (
        _factorized_embedding(model.vocab_size, projection.token_prior_rank, model.dim, projection.token_prior_window)
        if projection.token_prior_rank
        else ()
    )
    bigrams = (
        _factorized_embedding(projection.bigram_rows, projection.bigram_rank, model.dim)
        if projection.bigram_rows
        else ()
    )
    return tokens + bigrams


def _projection(model: ModelConfig, *, down: bool) -> ParameterGroup:
    """Down projection at the end of a segment, or up projection at the start of the next."""
    width = model.state_width
    if model.projection.kind == "keel":
        return ()
    if model.projection.kind == "learned":
        return (replace(_matrix(model.dim, width), is_orthonormal=True),)
    hidden = model.projection.hidden or 2 * width
    wide, narrow = (model.dim, width) if down else (width, model.dim)
    return _matrix(wide, hidden), _matrix(hidden, narrow)
