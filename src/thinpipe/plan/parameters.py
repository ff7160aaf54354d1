"""The trainable numbers of every segment, by arithmetic: the shapes that `models/` builds on the meta device.

Held equal to those in `tests/plan/test_needs.py`. A new family says its blocks here, and its norms.
"""

from dataclasses import dataclass, replace
from typing import Literal

from thinpipe.models.config import GPT2Config, LlamaConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    numbers: int
    multiplies: bool = False
    """It is a factor of a matrix product, and costs operations."""
    is_table: bool = False
    """It is looked up by ids, or widens what is."""
    squares: int | None = None
    """Of coordinates: numbers of a second moment with one for each row. None: it has no rows of that kind."""
    is_orthonormal: bool = False
    is_tied: bool = False
    """It is another parameter once more."""

    def second_moment(self, rule: Literal["row", "element"]) -> int:
        if self.is_orthonormal:
            return 1
        return self.numbers if self.squares is None or rule == "element" else self.squares


Part = tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentParts:
    """What a segment is made of. All its blocks are alike; a part that it does not have is empty."""

    blocks: int
    block: Part
    first: Part = ()
    anchors: Part = ()
    entry: Part = ()
    exit: Part = ()
    last: Part = ()

    @property
    def ends(self) -> Part:
        return (*self.first, *self.anchors, *self.entry, *self.exit, *self.last)

    @property
    def own(self) -> Part:
        """Each once."""
        return tuple(each for each in (*self.ends, *self.block * self.blocks) if not each.is_tied)


def segment_parts(model: ModelConfig) -> list[SegmentParts]:
    parts = []
    for index, indices in enumerate(model.segments):
        is_first, is_last = index == 0, index == len(model.segments) - 1
        has_neck = model.has_neck
        parts.append(
            SegmentParts(
                blocks=len(indices),
                block=_block(model, confined=indices.start < model.first_free_block),
                first=_first(model) if is_first else (),
                anchors=_anchors(model) if has_neck and not is_first else (),
                entry=_gate(model, shortens=False) if has_neck and not is_first else (),
                exit=_gate(model, shortens=True) if has_neck and not is_last else (),
                last=(_norm(model), replace(_matrix(model.dim, model.vocab_size), is_tied=model.tied))
                if is_last
                else (),
            )
        )
    return parts


def _matrix(inputs: int, outputs: int) -> Parameter:
    return Parameter(numbers=inputs * outputs, multiplies=True)


def _norm(model: ModelConfig) -> Parameter:
    """Scales, and shifts where there are biases."""
    return Parameter(numbers=(2 if isinstance(model, GPT2Config) else 1) * model.dim)


def _block(model: ModelConfig, *, confined: bool) -> Part:
    norms = (_norm(model), _norm(model))
    if isinstance(model, LlamaConfig):
        keys = model.n_kv_heads * model.head_dim
        attention = (_matrix(model.dim, model.dim), _matrix(model.dim, keys), _matrix(model.dim, keys))
        mlp = (_matrix(model.dim, model.hidden_dim), _matrix(model.dim, model.hidden_dim))
        return norms + attention + mlp + _writers(model, model.hidden_dim, confined=confined)
    assert isinstance(model, GPT2Config), f"a plan does not know blocks of {model.family}"
    readers = (_matrix(model.dim, 3 * model.dim), _matrix(model.dim, model.hidden_dim))
    biases = Parameter(numbers=3 * model.dim), Parameter(numbers=model.hidden_dim)
    return norms + readers + biases + _writers(model, model.hidden_dim, confined=confined)


def _writers(model: ModelConfig, hidden: int, *, confined: bool) -> Part:
    """Of attention and of the MLP; where norms have biases, so have they."""
    width = model.subspace.width if confined else None
    matrices = tuple(
        replace(_matrix(inputs, width or model.dim), squares=None if width is None else inputs)
        for inputs in (model.dim, hidden)
    )
    bias = Parameter(numbers=width or model.dim, squares=None if width is None else 1)
    return matrices + ((bias, bias) if isinstance(model, GPT2Config) else ())


def _first(model: ModelConfig) -> Part:
    if model.neck.first_rank:
        return _low_rank(model.vocab_size, model.neck.first_rank, model.dim)
    width = model.subspace.width
    rows = (model.vocab_size, model.max_seq_len) if model.has_position_table else (model.vocab_size,)
    return tuple(
        Parameter(numbers=count * (width or model.dim), is_table=True, squares=None if width is None else count)
        for count in rows
    )


def _low_rank(rows: int, rank: int, dim: int, reach: int = 1) -> Part:
    return Parameter(numbers=rows * rank, is_table=True), replace(_matrix(rank * reach, dim), is_table=True)


def _anchors(model: ModelConfig) -> Part:
    neck = model.neck
    tokens = _low_rank(model.vocab_size, neck.anchor_rank, model.dim, neck.anchor_reach) if neck.anchor_rank else ()
    pairs = _low_rank(neck.ngram_rows, neck.ngram_rank, model.dim) if neck.ngram_rows else ()
    return tokens + pairs


def _gate(model: ModelConfig, *, shortens: bool) -> Part:
    """The exit of a segment, which shortens, or the entry of the next."""
    width = model.state_width
    if model.neck.kind == "keel":
        return ()
    if model.neck.kind == "learned":
        return (replace(_matrix(model.dim, width), is_orthonormal=True),)
    hidden = model.neck.hidden or 2 * width
    wide, narrow = (model.dim, width) if shortens else (width, model.dim)
    return _matrix(wide, hidden), _matrix(hidden, narrow)
