"""Boundary projection: D-wide residual streams inside segments, K numbers per token across a boundary.

At the end of a segment the down projection makes the message from the stream. At the start of the next segment the up
projection makes a D-wide stream from the message, to which the `TokenPrior` is added: a trainable function of the token
ids, which every segment has.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.config.model import ModelConfig
from thinpipe.subspace import ResidualWriter, Stream
from thinpipe.subspace.factorized_embedding import FactorizedEmbedding
from thinpipe.subspace.parameter_tags import mark_orthonormal
from thinpipe.subspace.stream import DenseStream

_BIGRAM_HASH_FACTORS = 2654435761, 2246822519
_BIGRAM_HASH_PRIME = 2**31 - 1


class TokenPrior(nn.Module):
    """Token prior of a segment: low-rank embeddings of the last `token_prior_window` tokens, and of the bigram of the
    token and the one before (hashed to `bigram_rows` rows). Either part may be missing."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        projection = config.projection
        self.vocab_size, self.rows = config.vocab_size, projection.bigram_rows
        self.tokens = self.bigrams = None
        if projection.token_prior_rank:
            self.tokens = FactorizedEmbedding(
                config.vocab_size, projection.token_prior_rank, config.dim, projection.token_prior_window
            )
        if projection.bigram_rows:
            self.bigrams = FactorizedEmbedding(projection.bigram_rows, projection.bigram_rank, config.dim)

    tokens: FactorizedEmbedding | None
    bigrams: FactorizedEmbedding | None

    @property
    def lookback(self) -> int:
        """Number of preceding tokens that the prior of a token depends on."""
        return max(0 if self.tokens is None else self.tokens.window - 1, 0 if self.bigrams is None else 1)

    def forward(self, ids_BT: Tensor, previous_BP: Tensor | None = None) -> Tensor | None:
        """The prior, [B, T, D]; None without any table.

        `previous_BP`: up to `lookback` tokens before `ids_BT`; None at the beginning of a text.
        """
        prior_BTD: Tensor | None = None
        if self.tokens is not None:
            prior_BTD = self.tokens(ids_BT, previous_BP)
        if self.bigrams is not None:
            of_bigrams_BTD = self.bigrams(self.bigram_hashes(ids_BT, previous_BP))
            prior_BTD = of_bigrams_BTD if prior_BTD is None else prior_BTD + of_bigrams_BTD
        return prior_BTD

    def bigram_hashes(self, ids_BT: Tensor, previous_BP: Tensor | None) -> Tensor:
        """Row of the bigram table for each token and the token before. Integer arithmetic, equal on all platforms."""
        nothing_B1 = torch.full_like(ids_BT[:, :1], self.vocab_size)
        previous_BT = torch.cat((nothing_B1 if previous_BP is None else previous_BP[:, -1:], ids_BT[:, :-1]), dim=1)
        mixed_BT = (previous_BT * _BIGRAM_HASH_FACTORS[0] + ids_BT * _BIGRAM_HASH_FACTORS[1]) % _BIGRAM_HASH_PRIME
        return mixed_BT % self.rows


class ChannelProjection(nn.Module):
    """Keel: down projection keeps the first K channels, up projection pads them with zeros. No parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.projection.width is not None
        self.dim, self.width = config.dim, config.projection.width

    def down_project(self, stream_BTD: Tensor) -> Tensor:
        return stream_BTD[..., : self.width]

    def up_project(self, state_BTK: Tensor) -> Tensor:
        return F.pad(state_BTK, (0, self.dim - self.width))


class OrthonormalProjection(nn.Module):
    """Projection on K trainable orthonormal columns. The down projection before a boundary and the up projection after
    it have separate parameters, so no gradients of parameters are exchanged."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.projection.width is not None
        self.columns_DK = nn.Parameter(torch.empty(config.dim, config.projection.width))
        mark_orthonormal(self.columns_DK)

    def down_project(self, stream_BTD: Tensor) -> Tensor:
        return stream_BTD @ self.columns_DK

    def up_project(self, state_BTK: Tensor) -> Tensor:
        return state_BTK @ self.columns_DK.T


class BottleneckProjection(ChannelProjection):
    """The first K channels, plus the output of a small MLP."""

    def __init__(self, config: ModelConfig, *, down: bool) -> None:
        super().__init__(config)
        hidden = config.projection.hidden or 2 * self.width
        wide, narrow = (self.dim, self.width) if down else (self.width, self.dim)
        self.inner = nn.Linear(wide, hidden, bias=False)
        self.outer = ResidualWriter(hidden, narrow, bias=False)

    def down_project(self, stream_BTD: Tensor) -> Tensor:
        return super().down_project(stream_BTD) + self._correction(stream_BTD)

    def up_project(self, state_BTK: Tensor) -> Tensor:
        return super().up_project(state_BTK) + self._correction(state_BTK)

    def _correction(self, values: Tensor) -> Tensor:
        made: Tensor = self.outer(F.silu(self.inner(values)))
        return made.to(values.dtype)


Projection = ChannelProjection | OrthonormalProjection
"""The down projection at the end of a segment, or the up projection at the start of the next one."""
PROJECTIONS: dict[str, Callable[[ModelConfig, bool], Projection]] = {
    "keel": lambda config, _down: ChannelProjection(config),
    "learned": lambda config, _down: OrthonormalProjection(config),
    "bottleneck": lambda config, down: BottleneckProjection(config, down=down),
}


class BoundaryProjection(nn.Module):
    """Projections of one segment: up projection and token prior (not in the first segment), and down projection (not in
    the last segment)."""

    def __init__(self, config: ModelConfig, segment: int) -> None:
        super().__init__()
        make, projection = PROJECTIONS[config.projection.kind], config.projection
        self.segment, self.subtracts_prior = segment, projection.kind == "keel"
        is_first, is_last = segment == 0, segment == len(config.segments) - 1
        has_token_prior = not is_first and bool(projection.token_prior_rank or projection.bigram_rows)
        self.token_prior = TokenPrior(config) if has_token_prior else None
        self.up_projection = None if is_first else make(config, False)
        self.down_projection = None if is_last else make(config, True)

    token_prior: TokenPrior | None
    up_projection: Projection | None
    down_projection: Projection | None

    @property
    def lookback(self) -> int:
        return 0 if self.token_prior is None else self.token_prior.lookback

    def open(self, ids_BT: Tensor, state: Tensor, previous_BP: Tensor | None) -> tuple[Stream, Tensor | None]:
        """The segment's input stream, and the token prior contained in it (None without one)."""
        if self.up_projection is None:
            return DenseStream(state), None
        prior_BTD = None if self.token_prior is None else self.token_prior(ids_BT, previous_BP)
        with torch.autocast(state.device.type, enabled=False):
            opened_BTD = self.up_projection.up_project(state)
        return DenseStream(opened_BTD if prior_BTD is None else prior_BTD.to(state.dtype) + opened_BTD), prior_BTD

    def close(self, stream: Stream, prior_BTD: Tensor | None) -> Tensor:
        """The message to the next segment: the down projection of the stream. For a keel the segment's own token prior
        is subtracted first, so that the first K channels carry only what the blocks of all segments wrote to them."""
        assert self.down_projection is not None
        written_BTD = stream.dense()
        if self.subtracts_prior and prior_BTD is not None:
            written_BTD = written_BTD - prior_BTD.to(written_BTD.dtype)
        device = written_BTD.device.type
        in_bf16 = isinstance(self.down_projection, BottleneckProjection) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=in_bf16):
            message: Tensor = self.down_projection.down_project(written_BTD)
        return message.contiguous()
