"""Length and layout of boundary messages in bytes, for the compressors and for `thinpipe plan`. Imports no torch.

A length follows from the model and the settings alone. Every kind of compression has a layout class here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from thinpipe.config.boundary import BoundaryConfig, CompressionConfig, FormatName
from thinpipe.core.errors import UserError
from thinpipe.core.token_flags import FLAG_BITS
from thinpipe.core.units import BF16_NBYTES


def id_nbytes(vocab_size: int) -> int:
    """Bytes per token id: 2, 3 or 4."""
    return next(size for size in (2, 3, 4) if vocab_size <= 1 << (8 * size))


def id_bits(vocab_size: int, *, has_flags: bool) -> int:
    """Bits per token id: whole bytes, and up to two more if its flags do not fit into unused ones."""
    whole = 8 * id_nbytes(vocab_size)
    return max(whole, (vocab_size - 1).bit_length() + FLAG_BITS) if has_flags else whole


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` bit-packed integers of `bits` bits."""
    return -(-count * bits // 8)


@dataclass(frozen=True)
class RowSize:
    """Size of a row of values in a number format."""

    bits: int
    """Bits per value."""
    scale_nbytes: int = 0
    """Bytes of the row's scale; 0 for floating-point formats."""

    def nbytes(self, width: int) -> int:
        return self.scale_nbytes + packed_nbytes(width, self.bits)


ROW_SIZES: dict[FormatName, RowSize] = {
    "fp32": RowSize(32),
    "bf16": RowSize(16),
    "int8": RowSize(8, BF16_NBYTES),
    "int4": RowSize(4, BF16_NBYTES),
}


@dataclass(frozen=True, kw_only=True)
class MessageSize:
    """Dimensions of the messages of a boundary, for one micro-batch. Both ends know them in advance."""

    batch: int
    """Samples per micro-batch."""
    tokens: int
    """Tokens per sample that have a state. One more token id, or its flags, per sample is sent: the label of the last
    token."""
    width: int
    """Numbers per token in the state."""
    vocab_size: int
    has_flags: bool = False
    """Whether the ids have the flags of chats (`core.token_flags`)."""
    has_ids: bool = True
    """Whether token ids cross the boundary; if not, the flags of chats do alone, and labels go straight to the last
    segment."""

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def ids_nbytes(self) -> int:
        """Bytes that follow the state: token ids with their flags, or the flags alone."""
        bits = id_bits(self.vocab_size, has_flags=self.has_flags) if self.has_ids else FLAG_BITS * self.has_flags
        return packed_nbytes(self.batch * (self.tokens + 1), bits)

    @property
    def labels_nbytes(self) -> int:
        """Bytes of the labels, where no ids cross the boundaries; else 0."""
        return 0 if self.has_ids else self.rows * id_nbytes(self.vocab_size)


class MessageLayout(Protocol):
    @property
    def nbytes(self) -> int: ...


class NumberFormatLayout:
    """Layout of kind "none": all values, one row per token."""

    def __init__(self, size: MessageSize, name: FormatName) -> None:
        self.nbytes = size.rows * ROW_SIZES[name].nbytes(size.width)


class TopKLayout:
    """Layout of top-k: the selected values of each group, then their positions, as bit-packed indices or as a bitmap,
    whichever is shorter."""

    def __init__(self, size: MessageSize, settings: CompressionConfig) -> None:
        assert settings.keep is not None
        self.groups = size.rows if settings.per == "token" else size.batch
        self.group = size.rows * size.width // self.groups
        """Values per group: a token's or a sample's values, among which the largest are selected."""
        self.count = max(1, round(settings.keep * self.group))
        self.position_bits = (self.group - 1).bit_length()
        self.as_bitmap = self.group < self.count * self.position_bits
        positions = (self.group, 1) if self.as_bitmap else (self.count, self.position_bits)
        self.values_nbytes = masked_nbytes(self, settings.format)
        self.nbytes = self.values_nbytes + self.groups * packed_nbytes(*positions)


def masked_nbytes(layout: TopKLayout, name: FormatName | None) -> int:
    """Bytes of the selected values without their positions: one row per group."""
    return layout.groups * ROW_SIZES[name or "bf16"].nbytes(layout.count)


class QuantiseLayout:
    """Layout of quantisation: minimum and step of each tile, then bit-packed integers."""

    def __init__(self, size: MessageSize, settings: CompressionConfig) -> None:
        assert settings.bits is not None
        sample = size.tokens * size.width
        self.tile = settings.tile or (size.width if settings.per == "token" else sample)
        self.tiles = -(-sample // self.tile)
        """Tiles per sample. The last tile may be shorter."""
        self.numbers_nbytes = packed_nbytes(size.rows * size.width, settings.bits)
        self.nbytes = 2 * size.batch * self.tiles * BF16_NBYTES + self.numbers_nbytes


class OutliersLayout:
    """Layout of kind "quantise" with its outliers: whole tokens, then whole channels, both in bfloat16, then the rest
    as in `QuantiseLayout`, then the bit-packed positions of the channels. Raises UserError if there is no rest."""

    def __init__(self, size: MessageSize, settings: CompressionConfig) -> None:
        self.tokens, self.channels = settings.whole_tokens or 0, settings.whole_channels or 0
        _refuse_all_whole("tokens", self.tokens, size.tokens)
        _refuse_all_whole("channels", self.channels, size.width)
        rest = replace(size, tokens=size.tokens - self.tokens)
        self.position_bits = (size.width - 1).bit_length()
        self.tokens_nbytes = size.batch * self.tokens * size.width * BF16_NBYTES
        self.channels_nbytes = rest.rows * self.channels * BF16_NBYTES
        self.positions_nbytes = packed_nbytes(self.channels, self.position_bits)
        whole_nbytes = self.tokens_nbytes + self.channels_nbytes + self.positions_nbytes
        self.nbytes = whole_nbytes + QuantiseLayout(rest, settings).nbytes


def _refuse_all_whole(what: str, whole: int, there_are: int) -> None:
    if whole >= there_are:
        raise UserError(
            f"{whole} whole {what} of {there_are} leave nothing to quantise: lower whole_{what} of boundary.states or "
            "boundary.gradients"
        )


class LowRankLayout:
    """Layout of the two factors: [rows, rank], then [rank, width]. Raises UserError if the rank is not low."""

    def __init__(self, size: MessageSize, settings: CompressionConfig) -> None:
        assert settings.rank is not None
        if settings.rank >= min(size.rows, size.width):
            raise UserError(
                f"a rank of {settings.rank} is no less than that of {size.rows} tokens of {size.width} numbers: "
                "lower boundary.states.rank or boundary.gradients.rank"
            )
        row = ROW_SIZES[settings.format or "bf16"]
        self.left_nbytes = size.rows * row.nbytes(settings.rank)
        self.nbytes = self.left_nbytes + settings.rank * row.nbytes(size.width)


MESSAGE_LAYOUTS: dict[str, Callable[[MessageSize, CompressionConfig], MessageLayout]] = {
    "topk": TopKLayout,
    "quantise": OutliersLayout,
    "lowrank": LowRankLayout,
}


def ids_cross(settings: BoundaryConfig, *, segments_need_ids: bool) -> bool:
    """Whether token ids cross the boundaries: because segments look them up, or because AQ-SGD keys its samples by
    them."""
    return segments_need_ids or settings.states.feedback == "aqsgd"


def forward_nbytes(settings: BoundaryConfig, size: MessageSize) -> int:
    """Bytes of a forward message: an encoded state, and the token ids or their flags."""
    return _payload_nbytes(settings.states, settings.forward, size) + size.ids_nbytes


def backward_nbytes(settings: BoundaryConfig, size: MessageSize) -> int:
    """Bytes of a backward message: an encoded gradient."""
    if settings.gradients.reuse_mask:
        return masked_nbytes(TopKLayout(size, settings.states), settings.gradients.format)
    return _payload_nbytes(settings.gradients, settings.backward, size)


def _payload_nbytes(compression: CompressionConfig, name: FormatName, size: MessageSize) -> int:
    layout = (
        NumberFormatLayout(size, name)
        if compression.kind == "none"
        else MESSAGE_LAYOUTS[compression.kind](size, compression)
    )
    return layout.nbytes
