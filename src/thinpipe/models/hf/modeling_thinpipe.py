"""Llama with boundary projections: only a few numbers per token pass from one segment to the next, which rebuilds the
residual stream from them and from the token ids.

`thinpipe export` copies this file into the exported folder, where `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)` runs it. It therefore needs only torch and transformers (4.56 or newer), and thinpipe never
imports it. Everything but the boundaries is transformers' own Llama.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

BIGRAM_HASH_FACTORS = 2654435761, 2246822519
BIGRAM_HASH_PRIME = 2**31 - 1


class ThinpipeConfig(LlamaConfig):
    """Configuration of a Llama with boundary projections."""

    model_type = "thinpipe_projection"
    base_model_pp_plan = {}  # noqa: RUF012 (no pipeline plan: later segments need the token ids too)

    boundaries: list[int] | None = None
    """Indices of the blocks that are preceded by a boundary."""
    projection_kind: str = "keel"
    """keel, learned or bottleneck."""
    projection_width: int = 0
    """Numbers per token that cross a boundary."""
    projection_hidden: int = 0
    """bottleneck only: hidden width of the MLPs."""
    embedding_rank: int = 0
    """Rank of the first segment's token embedding. 0: full rank."""
    token_prior_rank: int = 0
    """Rank of the token prior of the other segments. 0: no token prior."""
    token_prior_window: int = 1
    """Tokens that the token prior of a position reads: the token itself and the window - 1 tokens before it."""
    bigram_rows: int = 0
    """Rows of the bigram tables of the token prior. 0: no bigram tables."""
    bigram_rank: int = 0
    """Rank of the bigram tables."""


class FactorizedEmbedding(nn.Module):
    """Low-rank embedding: a narrow row per id, and one matrix that maps the concatenated rows of a token and of the
    `window` - 1 tokens before it to the model's width."""

    def __init__(self, rows: int, rank: int, dim: int, window: int = 1) -> None:
        super().__init__()
        self.window = window
        self.rows = nn.Embedding(rows, rank)
        self.up_project = nn.Linear(rank * window, dim, bias=False)

    def forward(self, ids: Tensor, earlier: Sequence[Tensor] = ()) -> Tensor:
        """`earlier`: the ids one position before, two positions before and so on; an id beyond the table means none."""
        rows, count = [self.rows(ids)], self.rows.num_embeddings
        for before in earlier[: self.window - 1]:
            rows.append(self.rows(before.clamp(max=count - 1)) * (before < count).unsqueeze(-1))
        wide: Tensor = self.up_project(torch.cat(rows, dim=-1))
        return wide


class TokenPrior(nn.Module):
    """Token prior of a segment: low-rank embeddings of the last tokens, and of the bigram with the token before."""

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__()
        self.n_rows, dim = config.bigram_rows, config.hidden_size
        rank, window = config.token_prior_rank, config.token_prior_window
        self.tokens = FactorizedEmbedding(config.vocab_size, rank, dim, window) if rank else None
        self.bigrams = FactorizedEmbedding(config.bigram_rows, config.bigram_rank, dim) if config.bigram_rows else None

    def forward(self, ids: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        if self.bigrams is None:
            assert self.tokens is not None
            of_tokens: Tensor = self.tokens(ids, earlier)
            return of_tokens
        mixed = (earlier[0] * BIGRAM_HASH_FACTORS[0] + ids * BIGRAM_HASH_FACTORS[1]) % BIGRAM_HASH_PRIME
        of_bigrams: Tensor = self.bigrams(mixed % self.n_rows)
        return of_bigrams if self.tokens is None else self.tokens(ids, earlier) + of_bigrams


class ChannelProjection(nn.Module):
    """Keeps the first channels, or pads with zeros; a bottleneck adds the output of a small MLP."""

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.more = outputs - inputs
        self.inner = nn.Linear(inputs, hidden, bias=False) if hidden else None
        self.outer = nn.Linear(hidden, outputs, bias=False) if hidden else None

    def forward(self, values: Tensor) -> Tensor:
        kept = F.pad(values, (0, self.more))  # negative padding truncates
        if self.inner is None or self.outer is None:
            return kept
        beside: Tensor = self.outer(F.silu(self.inner(values)))
        return kept + beside


class Boundary(nn.Module):
    """One boundary: down projection of the segment before, up projection and token prior of the segment after."""

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__()
        dim, width = config.hidden_size, config.projection_width
        self.is_keel = config.projection_kind == "keel"
        if config.projection_kind == "learned":
            self.down_projection: nn.Module = nn.Linear(dim, width, bias=False)
            self.up_projection: nn.Module = nn.Linear(width, dim, bias=False)
        else:
            hidden = config.projection_hidden if config.projection_kind == "bottleneck" else 0
            self.down_projection, self.up_projection = (
                ChannelProjection(dim, width, hidden),
                ChannelProjection(width, dim, hidden),
            )
        self.token_prior = TokenPrior(config) if config.token_prior_rank or config.bigram_rows else None

    def forward(self, stream: Tensor, prior_before: Tensor | None, prior: Tensor | None) -> Tensor:
        """`prior_before`, `prior`: token priors of the segment before and of the segment after the boundary."""
        if self.is_keel and prior_before is not None:
            stream = stream - prior_before.to(stream.device)
        opened: Tensor = self.up_projection(self.down_projection(stream))
        return opened if prior is None else prior.to(opened.device) + opened


class ThinpipeDecoderLayer(LlamaDecoderLayer):
    """Llama block, preceded by a boundary if one lies before it."""

    def __init__(self, config: ThinpipeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        boundaries = list(config.boundaries or ())
        self.boundary = Boundary(config) if layer_idx in boundaries else None
        self.segment = sum(boundary <= layer_idx for boundary in boundaries)

    def forward(
        self, hidden_states: Tensor, *args: Any, priors: list[Tensor | None] | None = None, **kwargs: Any
    ) -> Any:
        if self.boundary is not None:
            prior_before, prior = (None, None) if priors is None else priors[self.segment - 1 : self.segment + 1]
            hidden_states = self.boundary(hidden_states, prior_before, prior)
        return super().forward(hidden_states, *args, **kwargs)


class ThinpipeModel(LlamaModel):
    config_class = ThinpipeConfig
    config: ThinpipeConfig
    _no_split_modules = ["ThinpipeDecoderLayer"]  # noqa: RUF012 (as in transformers)
    supports_gradient_checkpointing = False  # the gradients of the token priors would be lost silently
    _can_compile_fullgraph = False

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__(config)
        if config.embedding_rank:
            table: Any = FactorizedEmbedding(config.vocab_size, config.embedding_rank, config.hidden_size)
            self.embed_tokens = table
        self.layers = nn.ModuleList(ThinpipeDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        priors: list[Tensor | None] | None = None
        if self.config.token_prior_rank or self.config.bigram_rows:
            if input_ids is None:
                raise ValueError("every segment of this model starts from token ids: give input_ids, not inputs_embeds")
            if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
                past_key_values = DynamicCache(config=self.config)
            ids = input_ids.long()
            earlier = self._previous_ids(ids, attention_mask, position_ids, past_key_values) if self.lookback else []
            priors = [
                None,
                *(token_prior(ids, earlier) for token_prior in self.modules() if isinstance(token_prior, TokenPrior)),
            ]
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            priors=priors,
            **kwargs,
        )

    @property
    def lookback(self) -> int:
        """Number of preceding tokens that the token prior of a token depends on."""
        looks_back = self.config.token_prior_window - 1 if self.config.token_prior_rank else 0
        return max(looks_back, 1 if self.config.bigram_rows else 0)

    def _previous_ids(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> list[Tensor]:
        """The ids one position before, two positions before and so on; `vocab_size` marks padding and positions before
        the beginning of a text."""
        none, count = self.config.vocab_size, ids.shape[1]
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                raise ValueError(
                    "tokens before one are not looked for in padding, which shows in an attention_mask of batch x "
                    "tokens only: give such a one, and no static cache"
                )
            ids = ids.masked_fill(mask[:, -count:] == 0, none)
        if cache is not None:
            ids = self._cached_ids(ids, cache)
        earlier = [F.pad(ids, (by, 0), value=none)[:, -count - by : -by] for by in range(1, self.lookback + 1)]
        if positions is None:
            return earlier
        return [before.masked_fill(positions < by, none) for by, before in enumerate(earlier, 1)]

    def _cached_ids(self, ids: Tensor, cache: Cache) -> Tensor:
        """All token ids so far. They are stored as an additional layer of the cache, so that beam search and cropping
        apply to them as to the keys."""
        layers: list[Any] = cache.layers
        if any(layer.is_compileable for layer in layers):
            raise ValueError("the ids before are kept in a cache that grows: give no static cache")
        make: Any = cache.layer_class_to_replicate
        layers += [make() for _ in range(len(layers), self.config.num_hidden_layers)]
        if len(layers) == self.config.num_hidden_layers:
            layers.append(DynamicLayer())
        if layers[-1].get_seq_length() != cache.get_seq_length():
            raise ValueError("the cache lacks the token ids of what it holds: begin with an empty one")
        as_keys = ids[:, None, :, None]
        keys: Tensor = layers[-1].update(as_keys, as_keys)[0]
        return keys[:, 0, :, 0]


class ThinpipeForCausalLM(LlamaForCausalLM):
    config_class = ThinpipeConfig
    config: ThinpipeConfig
    _tied_weights_keys = {}  # noqa: RUF012
    _no_split_modules = ThinpipeModel._no_split_modules
    supports_gradient_checkpointing = False
    _can_compile_fullgraph = False

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__(config)
        self.model = ThinpipeModel(config)
        self.post_init()

    def resize_token_embeddings(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("every segment has tables of the tokens, which cannot be resized")
