"""Trainable parameters of a model: names, shapes and tags, from its configuration alone. Imports no torch.

`models.build` refuses a model whose modules differ from this description, and `planning/` computes costs from it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from thinpipe.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor."""

    name: str
    """Name in the group of parameters to which it belongs (see `SegmentShapes`)."""
    shape: tuple[int, ...]
    is_matmul: bool = False
    """True for a factor of a matrix product, which costs FLOPs."""
    is_table: bool = False
    """True for a lookup table (by token, bigram or position) and for the matrix that projects its rows up."""
    coordinates_axis: int | None = None
    """Axis of subspace coordinates. None: not in a subspace."""
    is_orthonormal: bool = False
    """True for a matrix on the Stiefel manifold, whose second moment is a single number."""
    is_tied: bool = False
    """True for a second use of a parameter that is counted elsewhere."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def second_moment_numel(self, rule: Literal["row", "element"]) -> int:
        """Size of the optimiser's second moment."""
        if self.is_orthonormal:
            return 1
        if self.coordinates_axis is None or rule == "element":
            return self.numel
        return self.numel // self.shape[self.coordinates_axis]

    def under(self, prefix: str) -> "Parameter":
        return replace(self, name=f"{prefix}.{self.name}")


ParameterGroup = tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentShapes:
    """Parameters of a segment. All its blocks are alike; groups that the segment does not have are empty."""

    blocks: range
    """Indices of the blocks."""
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
        """All parameters, tied ones counted once. The parameters of every block have the same names here."""
        return tuple(each for each in (*self.ends, *self.block * len(self.blocks)) if not each.is_tied)


def segment_shapes(model: ModelConfig) -> list[SegmentShapes]:
    """Parameters of every segment, in model order."""
    shapes = []
    for index, indices in enumerate(model.segments):
        is_first, is_last = index == 0, index == len(model.segments) - 1
        has_projection = model.has_projection
        shapes.append(
            SegmentShapes(
                blocks=indices,
                block=_block(model, in_subspace=indices.start < model.first_free_block),
                first=_first(model) if is_first else (),
                token_prior=_token_prior(model) if has_projection and not is_first else (),
                up_projection=_projection(model, down=False) if has_projection and not is_first else (),
                down_projection=_projection(model, down=True) if has_projection and not is_last else (),
                last=_last(model) if is_last else (),
            )
        )
    return shapes


def named_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Parameters by their names in the whole model, in the order in which the modules of the model are registered."""
    shapes = segment_shapes(model)
    found = [each.under("first") for each in shapes[0].first]
    for segment in shapes:
        found += [each.under(f"blocks.{index}") for index in segment.blocks for each in segment.block]
    found += [each.under("last") for each in shapes[-1].last]
    for index, segment in enumerate(shapes):
        for group in ("token_prior", "up_projection", "down_projection"):
            found += [each.under(f"projections.{index}.{group}") for each in getattr(segment, group)]
    return {each.name: each for each in found if not each.is_tied}


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False, in_subspace: bool = False) -> ParameterGroup:
    """Weight and bias of a linear layer. `in_subspace`: the outputs are subspace coordinates."""
    axis = 0 if in_subspace else None
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), is_matmul=True, coordinates_axis=axis)
    return (weight, Parameter(name=f"{name}.bias", shape=(outputs,), coordinates_axis=axis)) if bias else (weight,)


def _norm(model: ModelConfig, name: str) -> ParameterGroup:
    scale = Parameter(name=f"{name}.weight", shape=(model.dim,))
    return (scale, Parameter(name=f"{name}.bias", shape=(model.dim,))) if model.spec.norm == "layer" else (scale,)


def attention_heads(model: ModelConfig) -> tuple[int, int, int]:
    """Number of query heads and of key heads in a block, and the width of a head."""
    return model.n_heads, model.spec.attention.n_kv_heads(model), model.head_dim


def attention_widths(model: ModelConfig) -> tuple[int, int, int]:
    """Numbers per token in the queries, keys and values of a block."""
    keys = model.spec.attention.n_kv_heads(model) * model.head_dim
    return model.dim, keys, keys


def _block(model: ModelConfig, *, in_subspace: bool) -> ParameterGroup:
    attention, mlp = model.spec.attention, model.spec.mlp
    written = model.subspace.width or model.dim if in_subspace else model.dim
    widths = attention_widths(model) if len(attention.readers) > 1 else (sum(attention_widths(model)),)
    hidden_dim: int = mlp.hidden_dim(model)
    group = _norm(model, attention.norm)
    for name, width in zip(attention.readers, widths, strict=True):
        group += _linear(f"{attention.name}.{name}", model.dim, width, bias=attention.reader_bias)
    writer = f"{attention.name}.{attention.writer}"
    group += _linear(writer, model.dim, written, bias=attention.writer_bias, in_subspace=in_subspace)
    group += _norm(model, mlp.norm)
    for name in mlp.readers:
        group += _linear(f"{mlp.name}.{name}", model.dim, hidden_dim, bias=mlp.reader_bias)
    writer = f"{mlp.name}.{mlp.writer}"
    return group + _linear(writer, hidden_dim, written, bias=mlp.writer_bias, in_subspace=in_subspace)


def _first(model: ModelConfig) -> ParameterGroup:
    spec, width = model.spec, model.subspace.width
    rank = model.projection.embedding_rank
    if rank:
        return _factorized_embedding(spec.token_embedding, model.vocab_size, rank, model.dim)
    rows = {spec.token_embedding: model.vocab_size}
    if spec.position_embedding is not None:
        rows[spec.position_embedding] = model.max_seq_len
    return tuple(
        Parameter(
            name=f"{name}.weight",
            shape=(count, width or model.dim),
            is_table=True,
            coordinates_axis=None if width is None else 1,
        )
        for name, count in rows.items()
    )


def _last(model: ModelConfig) -> ParameterGroup:
    [head] = _linear("lm_head", model.dim, model.vocab_size)
    return (*_norm(model, model.spec.final_norm), replace(head, is_tied=model.tied))


def _factorized_embedding(name: str, rows: int, rank: int, dim: int, window: int = 1) -> ParameterGroup:
    [up_project] = _linear(f"{name}.up_project", rank * window, dim)
    table = Parameter(name=f"{name}.rows.weight", shape=(rows, rank), is_table=True)
    return table, replace(up_project, is_table=True)


def _token_prior(model: ModelConfig) -> ParameterGroup:
    projection, group = model.projection, ParameterGroup()
    if rank := projection.token_prior_rank:
        group += _factorized_embedding("tokens", model.vocab_size, rank, model.dim, projection.token_prior_window)
    if projection.bigram_rows:
        group += _factorized_embedding("bigrams", projection.bigram_rows, projection.bigram_rank, model.dim)
    return group


def _projection(model: ModelConfig, *, down: bool) -> ParameterGroup:
    """Down projection at the end of a segment, or up projection at the start of the next."""
    width = model.state_width
    if model.projection.kind == "keel":
        return ()
    if model.projection.kind == "learned":
        return (Parameter(name="columns_DK", shape=(model.dim, width), is_matmul=True, is_orthonormal=True),)
    hidden = model.projection.hidden or 2 * width
    wide, narrow = (model.dim, width) if down else (width, model.dim)
    return _linear("inner", wide, hidden) + _linear("outer", hidden, narrow)
