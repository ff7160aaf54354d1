"""A Llama with necks: between its segments only a few numbers per token cross, the rest is made anew from token ids.

`thinpipe export` copies this file into the folder that it writes; `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)` runs it there. So it needs torch and transformers (4.56 or newer) alone, and thinpipe never
imports it. All but the boundaries is transformers' own Llama.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PAIR_FACTORS = 2654435761, 2246822519
PAIR_PRIME = 2**31 - 1


class ThinpipeConfig(LlamaConfig):
    """That of a Llama, and of its necks."""

    model_type = "thinpipe_neck"
    base_model_pp_plan = {}  # noqa: RUF012 (none: a segment needs the ids, too)

    boundaries: list[int] | None = None
    """Blocks before which a boundary lies."""
    neck_kind: str = "keel"
    """keel, learned or bottleneck."""
    neck_width: int = 0
    """Numbers per token that cross a boundary."""
    neck_hidden: int = 0
    """bottleneck: width of the small networks."""
    first_rank: int = 0
    """Of the first segment's table of tokens. 0: a full table."""
    anchor_rank: int = 0
    """Of the tables of tokens from which the other segments start. 0: none."""
    anchor_reach: int = 1
    """Tokens whose rows make the vector of one: itself and those before it."""
    ngram_rows: int = 0
    """Of their tables of pairs of tokens. 0: none."""
    ngram_rank: int = 0


class Table(nn.Module):
    """A narrow row for each id, and one matrix that makes wide those of a token and of `reach` - 1 before it."""

    def __init__(self, rows: int, rank: int, dim: int, reach: int = 1) -> None:
        super().__init__()
        self.reach = reach
        self.rows = nn.Embedding(rows, rank)
        self.widen = nn.Linear(rank * reach, dim, bias=False)

    def forward(self, ids: Tensor, earlier: Sequence[Tensor] = ()) -> Tensor:
        """`earlier`: the ids one before, two before and so on; a number behind the last row stands for none."""
        rows, count = [self.rows(ids)], self.rows.num_embeddings
        for before in earlier[: self.reach - 1]:
            rows.append(self.rows(before.clamp(max=count - 1)) * (before < count).unsqueeze(-1))
        wide: Tensor = self.widen(torch.cat(rows, dim=-1))
        return wide


class Anchors(nn.Module):
    """What a segment knows of a token by itself: a vector of its id and of those before, and one of the pair with the
    token before."""

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__()
        self.n_rows, dim = config.ngram_rows, config.hidden_size
        rank, reach = config.anchor_rank, config.anchor_reach
        self.tokens = Table(config.vocab_size, rank, dim, reach) if rank else None
        self.pairs = Table(config.ngram_rows, config.ngram_rank, dim) if config.ngram_rows else None

    def forward(self, ids: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        if self.pairs is None:
            assert self.tokens is not None
            of_tokens: Tensor = self.tokens(ids, earlier)
            return of_tokens
        mixed = (earlier[0] * PAIR_FACTORS[0] + ids * PAIR_FACTORS[1]) % PAIR_PRIME
        of_pairs: Tensor = self.pairs(mixed % self.n_rows)
        return of_pairs if self.tokens is None else self.tokens(ids, earlier) + of_pairs


class Channels(nn.Module):
    """Keeps the first channels, or adds zeros behind them; a bottleneck has a small network beside."""

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.more = outputs - inputs
        self.inner = nn.Linear(inputs, hidden, bias=False) if hidden else None
        self.outer = nn.Linear(hidden, outputs, bias=False) if hidden else None

    def forward(self, values: Tensor) -> Tensor:
        kept = F.pad(values, (0, self.more))  # negative: cuts off
        if self.inner is None or self.outer is None:
            return kept
        beside: Tensor = self.outer(F.silu(self.inner(values)))
        return kept + beside


class Boundary(nn.Module):
    """The exit of the segment before, the entry of the one behind it, and what that one knows by itself."""

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__()
        dim, width = config.hidden_size, config.neck_width
        self.is_keel = config.neck_kind == "keel"
        if config.neck_kind == "learned":
            self.exit: nn.Module = nn.Linear(dim, width, bias=False)
            self.entry: nn.Module = nn.Linear(width, dim, bias=False)
        else:
            hidden = config.neck_hidden if config.neck_kind == "bottleneck" else 0
            self.exit, self.entry = Channels(dim, width, hidden), Channels(width, dim, hidden)
        self.anchors = Anchors(config) if config.anchor_rank or config.ngram_rows else None

    def forward(self, stream: Tensor, base_before: Tensor | None, base: Tensor | None) -> Tensor:
        """`base_before`, `base`: what the two segments know by themselves."""
        if self.is_keel and base_before is not None:
            stream = stream - base_before.to(stream.device)
        opened: Tensor = self.entry(self.exit(stream))
        return opened if base is None else base.to(opened.device) + opened


class ThinpipeDecoderLayer(LlamaDecoderLayer):
    """A block of a Llama; after a boundary, that comes first."""

    def __init__(self, config: ThinpipeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        boundaries = list(config.boundaries or ())
        self.boundary = Boundary(config) if layer_idx in boundaries else None
        self.segment = sum(boundary <= layer_idx for boundary in boundaries)

    def forward(
        self, hidden_states: Tensor, *args: Any, bases: list[Tensor | None] | None = None, **kwargs: Any
    ) -> Any:
        if self.boundary is not None:
            base_before, base = (None, None) if bases is None else bases[self.segment - 1 : self.segment + 1]
            hidden_states = self.boundary(hidden_states, base_before, base)
        return super().forward(hidden_states, *args, **kwargs)


class ThinpipeModel(LlamaModel):
    config_class = ThinpipeConfig
    config: ThinpipeConfig
    _no_split_modules = ["ThinpipeDecoderLayer"]  # noqa: RUF012 (as in transformers)
    supports_gradient_checkpointing = False  # gradients of the tables would be lost without a word
    _can_compile_fullgraph = False

    def __init__(self, config: ThinpipeConfig) -> None:
        super().__init__(config)
        if config.first_rank:
            table: Any = Table(config.vocab_size, config.first_rank, config.hidden_size)
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
        bases: list[Tensor | None] | None = None
        if self.config.anchor_rank or self.config.ngram_rows:
            if input_ids is None:
                raise ValueError("every segment of this model starts from token ids: give input_ids, not inputs_embeds")
            if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
                past_key_values = DynamicCache(config=self.config)
            ids = input_ids.long()
            earlier = self._earlier(ids, attention_mask, position_ids, past_key_values) if self.reach else []
            bases = [None, *(anchors(ids, earlier) for anchors in self.modules() if isinstance(anchors, Anchors))]
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            bases=bases,
            **kwargs,
        )

    @property
    def reach(self) -> int:
        """How many tokens before one say something of it."""
        looks_back = self.config.anchor_reach - 1 if self.config.anchor_rank else 0
        return max(looks_back, 1 if self.config.ngram_rows else 0)

    def _earlier(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None) -> list[Tensor]:
        """The tokens one before, two before and so on; `vocab_size` stands for none: before a text, and padding."""
        none, count = self.config.vocab_size, ids.shape[1]
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                raise ValueError(
                    "tokens before one are not looked for in padding, which shows in an attention_mask of batch x "
                    "tokens only: give such a one, and no static cache"
                )
            ids = ids.masked_fill(mask[:, -count:] == 0, none)
        if cache is not None:
            ids = self._remembered(ids, cache)
        earlier = [F.pad(ids, (by, 0), value=none)[:, -count - by : -by] for by in range(1, self.reach + 1)]
        if positions is None:
            return earlier
        return [before.masked_fill(positions < by, none) for by, before in enumerate(earlier, 1)]

    def _remembered(self, ids: Tensor, cache: Cache) -> Tensor:
        """All ids so far. They are one more layer of the cache: beams and cuts do to them what they do to the keys."""
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
