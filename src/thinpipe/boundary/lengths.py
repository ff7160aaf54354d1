"""How long a message is, and of which parts. Methods cut their bytes by it, and plans count by it: no torch here.

A length follows from the model and the settings alone. Every kind of compression has a layout here, by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from thinpipe.boundary.settings import BoundarySection, Compression, FormatName
from thinpipe.core.errors import UserError

BF16_NBYTES = 2
"""Of the scale of a row of integers, and of either end of a range."""


def id_nbytes(vocab_size: int) -> int:
    """Bytes an id takes."""
    return next(size for size in (2, 3, 4) if vocab_size <= 1 << (8 * size))


def packed_nbytes(count: int, bits: int) -> int:
    """Of integers without gaps."""
    return -(-count * bits // 8)


@dataclass(frozen=True)
class RowLength:
    """Of a row of numbers in a number format."""

    bits: int
    scale_nbytes: int = 0

    def nbytes(self, width: int) -> int:
        return self.scale_nbytes + packed_nbytes(width, self.bits)


ROWS: dict[FormatName, RowLength] = {
    "fp32": RowLength(32),
    "bf16": RowLength(16),
    "int8": RowLength(8, BF16_NBYTES),
    "int4": RowLength(4, BF16_NBYTES),
}


@dataclass(frozen=True, kw_only=True)
class MessageSize:
    """One micro-batch at one boundary; known to both ends before anything is sent."""

    batch: int
    tokens: int
    """Tokens of a sample that have a state; one more id travels, the label of the last."""
    width: int
    """Numbers per token in the state."""
    vocab_size: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def ids_nbytes(self) -> int:
        return self.batch * (self.tokens + 1) * id_nbytes(self.vocab_size)


class Layout(Protocol):
    @property
    def nbytes(self) -> int: ...


class PlainLayout:
    """Every number, a row for each token."""

    def __init__(self, size: MessageSize, name: FormatName) -> None:
        self.nbytes = size.rows * ROWS[name].nbytes(size.width)


class TopKLayout:
    """The numbers that are kept of each group, then where they stood: packed integers, or one bit for every number
    where that is shorter."""

    def __init__(self, size: MessageSize, settings: Compression) -> None:
        assert settings.keep is not None
        self.groups = size.rows if settings.per == "token" else size.batch
        self.group = size.rows * size.width // self.groups
        """Numbers of which the largest are chosen."""
        self.count = max(1, round(settings.keep * self.group))
        self.position_bits = (self.group - 1).bit_length()
        self.as_bitmap = self.group < self.count * self.position_bits
        positions = (self.group, 1) if self.as_bitmap else (self.count, self.position_bits)
        self.values_nbytes = masked_nbytes(self, settings.format)
        self.nbytes = self.values_nbytes + self.groups * packed_nbytes(*positions)


def masked_nbytes(kept: TopKLayout, name: FormatName | None) -> int:
    """Of numbers whose places are known: a row for each group."""
    return kept.groups * ROWS[name or "bf16"].nbytes(kept.count)


class QuantiseLayout:
    """The least number and the step of each tile, then integers."""

    def __init__(self, size: MessageSize, settings: Compression) -> None:
        assert settings.bits is not None
        sample = size.tokens * size.width
        self.tile = settings.tile or (size.width if settings.per == "token" else sample)
        self.tiles = -(-sample // self.tile)
        """Of a sample. The last one may be shorter."""
        self.numbers_nbytes = packed_nbytes(size.rows * size.width, settings.bits)
        self.nbytes = 2 * size.batch * self.tiles * BF16_NBYTES + self.numbers_nbytes


class LowRankLayout:
    """Two thin matrices."""

    def __init__(self, size: MessageSize, settings: Compression) -> None:
        assert settings.rank is not None
        if settings.rank >= min(size.rows, size.width):
            raise UserError(
                f"a rank of {settings.rank} is no less than that of {size.rows} tokens of {size.width} numbers: "
                "lower boundary.states.rank or boundary.gradients.rank"
            )
        row = ROWS[settings.format or "bf16"]
        self.left_nbytes = size.rows * row.nbytes(settings.rank)
        self.nbytes = self.left_nbytes + settings.rank * row.nbytes(size.width)


LAYOUTS: dict[str, Callable[[MessageSize, Compression], Layout]] = {
    "topk": TopKLayout,
    "quantise": QuantiseLayout,
    "lowrank": LowRankLayout,
}


def forward_nbytes(settings: BoundarySection, size: MessageSize) -> int:
    """Of a state and the token ids behind it."""
    return _numbers_nbytes(settings.states, settings.forward, size) + size.ids_nbytes


def backward_nbytes(settings: BoundarySection, size: MessageSize) -> int:
    """Of a gradient."""
    if settings.gradients.reuse_mask:
        return masked_nbytes(TopKLayout(size, settings.states), settings.gradients.format)
    return _numbers_nbytes(settings.gradients, settings.backward, size)


def _numbers_nbytes(asked: Compression, name: FormatName, size: MessageSize) -> int:
    layout = PlainLayout(size, name) if asked.kind == "none" else LAYOUTS[asked.kind](size, asked)
    return layout.nbytes
