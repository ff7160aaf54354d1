"""KV cache for decoding: keys and values of the tokens so far, so that a new token costs one token's work.

A cache belongs to one text, or to a batch of texts of equal length, and is passed to `forward` by the caller: models
keep no state. Segments in different processes have a cache each. Not used in training; gradients do not flow through.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.config.model_family import MAX_FLOAT32_ATTENTION_TOKENS


class LayerKVCache:
    """KV cache of one block. Allocates `max_length` tokens on the first `extend`, which determines batch size, heads,
    dtype and device."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys_BNTH: Tensor | None = None
        self._values_BNTH: Tensor | None = None

    def extend(self, key_BNTH: Tensor, value_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new tokens; returns the keys and values of all tokens so far.

        Raises ValueError for tensors that require gradients, or of another batch size.
        """
        if key_BNTH.requires_grad or value_BNTH.requires_grad:
            raise ValueError("gradients do not flow through a KV cache: decode inside torch.no_grad()")
        if self._keys_BNTH is None or self._values_BNTH is None:
            batch, heads, _, head_dim = key_BNTH.shape
            self._keys_BNTH = key_BNTH.new_empty(batch, heads, self.max_length, head_dim)
            self._values_BNTH = torch.empty_like(self._keys_BNTH)
        if key_BNTH.shape[0] != self._keys_BNTH.shape[0]:
            raise ValueError(
                f"this KV cache is of {self._keys_BNTH.shape[0]} texts, not {key_BNTH.shape[0]}: "
                "make another KVCache for another batch"
            )
        start, self.length = self.length, self.length + key_BNTH.shape[2]
        self._keys_BNTH[:, :, start : self.length] = key_BNTH
        self._values_BNTH[:, :, start : self.length] = value_BNTH
        return self._keys_BNTH[:, :, : self.length], self._values_BNTH[:, :, : self.length]


class KVCache:
    """KV cache of a model, or of the blocks of one segment. `max_length`, in tokens, is at most max_seq_len."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._layers: dict[int, LayerKVCache] = {}
        self._last_ids: dict[int, Tensor] = {}

    def previous_ids(self, segment: int, ids_BT: Tensor, lookback: int) -> Tensor | None:
        """Up to `lookback` token ids that precede `ids_BT` in this segment; None at the beginning of a text. Records
        `ids_BT` for the next call."""
        previous_BP = self._last_ids.get(segment)
        seen_BS = ids_BT if previous_BP is None else torch.cat((previous_BP, ids_BT), dim=1)
        self._last_ids[segment] = seen_BS[:, max(0, seen_BS.shape[1] - lookback) :]
        return previous_BP

    def layer(self, block: int) -> LayerKVCache:
        return self._layers.setdefault(block, LayerKVCache(self.max_length))

    @property
    def length(self) -> int:
        """Number of tokens that every block has processed: the position of the next token."""
        return min((layer.length for layer in self._layers.values()), default=0)


def attend(
    query_BNTH: Tensor,
    key_BNTH: Tensor,
    value_BNTH: Tensor,
    cache: LayerKVCache | None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Causal attention of new tokens to each other and to the tokens in `cache`, which is extended by the new ones.
    `drop`: dropout of the attention weights."""
    if cache is not None:
        key_BNTH, value_BNTH = cache.extend(key_BNTH, value_BNTH)
    if drop is not None:
        return _attend_with_dropout(query_BNTH, key_BNTH, value_BNTH, drop)
    new, seen = query_BNTH.shape[2], key_BNTH.shape[2]
    # `is_causal` aligns the first query with the first key, which is right only with an empty cache. A single new token
    # attends to everything and needs no mask.
    mask_TT = None
    if new not in (1, seen):
        mask_TT = torch.ones(new, seen, dtype=torch.bool, device=query_BNTH.device).tril(seen - new)
    with _fast_precision(query_BNTH, seen) as dtype:
        mixed_BNTH = F.scaled_dot_product_attention(
            query_BNTH.to(dtype),
            key_BNTH.to(dtype),
            value_BNTH.to(dtype),
            attn_mask=mask_TT,
            is_causal=new == seen,
            enable_gqa=key_BNTH.shape[1] != query_BNTH.shape[1],
        )
    return mixed_BNTH.to(query_BNTH.dtype)


def _attend_with_dropout(
    query_BNTH: Tensor, key_BNTH: Tensor, value_BNTH: Tensor, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention with dropout of its weights, which torch's own attention draws from another generator on each device.
    Computed in at least float32, with [new, seen] matrices for every head."""
    (new, head_dim), seen = query_BNTH.shape[-2:], key_BNTH.shape[2]
    dtype = torch.promote_types(query_BNTH.dtype, torch.float32)
    future_TT = torch.full((new, seen), -torch.inf, dtype=dtype, device=query_BNTH.device).triu(seen - new + 1)
    queries_per_key = query_BNTH.shape[1] // key_BNTH.shape[1]
    key_BNTH, value_BNTH = (
        each.to(dtype).repeat_interleave(queries_per_key, dim=1).contiguous() for each in (key_BNTH, value_BNTH)
    )
    with torch.autocast(query_BNTH.device.type, enabled=False):
        scores_BNTT = (query_BNTH.to(dtype) * head_dim**-0.5) @ key_BNTH.mT
        mixed_BNTH = drop((scores_BNTT + future_TT).softmax(dim=-1)) @ value_BNTH
    return mixed_BNTH.to(query_BNTH.dtype)


@contextmanager
def _fast_precision(query_BNTH: Tensor, seen: int) -> Iterator[torch.dtype]:
    """The dtype for attention: float32 in place of bfloat16 for short texts on a CPU, where torch 2.13 is slower in
    bfloat16 (benchmarks/attention.py).

    Also used for generation, where it converts the short cache for every token: otherwise generated tokens would differ
    from the same text processed at once.
    """
    slow = query_BNTH.device.type == "cpu" and query_BNTH.dtype == torch.bfloat16
    if not slow or seen > MAX_FLOAT32_ATTENTION_TOKENS:
        yield query_BNTH.dtype
        return
    with torch.autocast("cpu", enabled=False):
        yield torch.float32
