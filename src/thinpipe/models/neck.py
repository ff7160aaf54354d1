"""Where one segment ends and the next begins, if blocks are free: K numbers per token cross, the rest is made anew.

Inside a segment the stream is D wide. Its exit makes the message of it; the entry of the next segment makes a stream of
the message and of what can be known from the token ids, which every segment has (`Anchors`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.models.config import ModelConfig
from thinpipe.subspace import Stream, Writer
from thinpipe.subspace.stiefel import mark_orthonormal
from thinpipe.subspace.stream import DenseStream
from thinpipe.subspace.table import Table

_PAIR_FACTORS = 2654435761, 2246822519
_PAIR_PRIME = 2**31 - 1


class Anchors(nn.Module):
    """What a segment knows of a token by itself: a vector of its id, and one of the pair with the token before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        neck = config.neck
        self.vocab_size, self.rows = config.vocab_size, neck.ngram_rows
        self.tokens = self.pairs = None
        if neck.anchor_rank:
            self.tokens = Table(config.vocab_size, neck.anchor_rank, config.dim, neck.anchor_reach)
        if neck.ngram_rows:
            self.pairs = Table(neck.ngram_rows, neck.ngram_rank, config.dim)

    tokens: Table | None
    pairs: Table | None

    @property
    def reach(self) -> int:
        """How many tokens before one say something of it."""
        return max(0 if self.tokens is None else self.tokens.reach - 1, 0 if self.pairs is None else 1)

    def forward(self, ids_BT: Tensor, before_BP: Tensor | None = None) -> Tensor | None:
        """None if there are none. `before_BP`: up to `reach` tokens before these; None: a text begins here."""
        base_BTD: Tensor | None = None
        if self.tokens is not None:
            base_BTD = self.tokens(ids_BT, before_BP)
        if self.pairs is not None:
            of_pairs_BTD = self.pairs(self.pair_rows(ids_BT, before_BP))
            base_BTD = of_pairs_BTD if base_BTD is None else base_BTD + of_pairs_BTD
        return base_BTD

    def pair_rows(self, ids_BT: Tensor, before_BP: Tensor | None) -> Tensor:
        """Integer arithmetic that is the same everywhere."""
        nothing_B1 = torch.full_like(ids_BT[:, :1], self.vocab_size)
        before_BT = torch.cat((nothing_B1 if before_BP is None else before_BP[:, -1:], ids_BT[:, :-1]), dim=1)
        mixed_BT = (before_BT * _PAIR_FACTORS[0] + ids_BT * _PAIR_FACTORS[1]) % _PAIR_PRIME
        return mixed_BT % self.rows


class Channels(nn.Module):
    """The first K channels cross as they are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.neck.width is not None
        self.dim, self.width = config.dim, config.neck.width

    def shorten(self, stream_BTD: Tensor) -> Tensor:
        return stream_BTD[..., : self.width]

    def widen(self, state_BTK: Tensor) -> Tensor:
        return F.pad(state_BTK, (0, self.dim - self.width))


class Projector(nn.Module):
    """K orthonormal columns of its own: an exit and the entry behind it learn apart, and nothing is sent for that."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.neck.width is not None
        self.columns_DK = nn.Parameter(torch.empty(config.dim, config.neck.width))
        mark_orthonormal(self.columns_DK)

    def shorten(self, stream_BTD: Tensor) -> Tensor:
        return stream_BTD @ self.columns_DK

    def widen(self, state_BTK: Tensor) -> Tensor:
        return state_BTK @ self.columns_DK.T


class Bottleneck(Channels):
    """The first K channels, and a small network beside them."""

    def __init__(self, config: ModelConfig, *, shortens: bool) -> None:
        super().__init__(config)
        hidden = config.neck.hidden or 2 * self.width
        wide, narrow = (self.dim, self.width) if shortens else (self.width, self.dim)
        self.inner = nn.Linear(wide, hidden, bias=False)
        self.outer = Writer(hidden, narrow, bias=False)

    def shorten(self, stream_BTD: Tensor) -> Tensor:
        return super().shorten(stream_BTD) + self._beside(stream_BTD)

    def widen(self, state_BTK: Tensor) -> Tensor:
        return super().widen(state_BTK) + self._beside(state_BTK)

    def _beside(self, values: Tensor) -> Tensor:
        made: Tensor = self.outer(F.silu(self.inner(values)))
        return made.to(values.dtype)


Gate = Channels | Projector
"""The exit of a segment or the entry of the next."""
KINDS: dict[str, Callable[[ModelConfig, bool], Gate]] = {
    "keel": lambda config, _shortens: Channels(config),
    "learned": lambda config, _shortens: Projector(config),
    "bottleneck": lambda config, shortens: Bottleneck(config, shortens=shortens),
}


class Neck(nn.Module):
    """Of one segment: its entry, but for the first, and its exit, but for the last."""

    def __init__(self, config: ModelConfig, segment: int) -> None:
        super().__init__()
        make, neck = KINDS[config.neck.kind], config.neck
        self.segment, self.relative = segment, neck.kind == "keel"
        is_first, is_last = segment == 0, segment == len(config.segments) - 1
        has_anchors = not is_first and bool(neck.anchor_rank or neck.ngram_rows)
        self.anchors = Anchors(config) if has_anchors else None
        self.entry = None if is_first else make(config, False)
        self.exit = None if is_last else make(config, True)

    anchors: Anchors | None
    entry: Gate | None
    exit: Gate | None

    @property
    def reach(self) -> int:
        return 0 if self.anchors is None else self.anchors.reach

    def open(self, ids_BT: Tensor, state: Tensor, before_BP: Tensor | None) -> tuple[Stream, Tensor | None]:
        """The stream of a segment, and what of it comes from the ids alone."""
        if self.entry is None:
            return DenseStream(state), None
        base_BTD = None if self.anchors is None else self.anchors(ids_BT, before_BP)
        with torch.autocast(state.device.type, enabled=False):
            opened_BTD = self.entry.widen(state)
        return DenseStream(opened_BTD if base_BTD is None else base_BTD.to(state.dtype) + opened_BTD), base_BTD

    def close(self, stream: Stream, base_BTD: Tensor | None) -> Tensor:
        """The message: of a keel, what was written to the first K channels by all segments so far, so that it passes
        from one to the next unchanged; else whatever the exit makes of the stream."""
        assert self.exit is not None
        written_BTD = stream.dense()
        if self.relative and base_BTD is not None:
            written_BTD = written_BTD - base_BTD.to(written_BTD.dtype)
        device = written_BTD.device.type
        in_bf16 = isinstance(self.exit, Bottleneck) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=in_bf16):
            message: Tensor = self.exit.shorten(written_BTD)
        return message.contiguous()
