"""Keys and values of the tokens seen so far, so that a new token costs one token's work (a KV cache).

A memory belongs to one text (or one batch of texts of the same length) and is handed to `forward` by whoever decodes:
models keep no state. Segments in processes of their own hold one each. Training does not use it, and gradients do not
flow through it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_IN_FLOAT32 = 512
"""Tokens of a text up to which attention on CPUs is computed in float32; beyond, bfloat16 catches up."""


class LayerMemory:
    """Of one block. Room for `max_length` tokens is taken when the first keys show batch, heads, dtype and device."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys_BNTH: Tensor | None = None
        self._values_BNTH: Tensor | None = None

    def extend(self, key_BNTH: Tensor, value_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Appends what new tokens bring and returns the keys and values of all tokens so far."""
        if key_BNTH.requires_grad or value_BNTH.requires_grad:
            raise ValueError("gradients do not flow through a memory: decode inside torch.no_grad()")
        if self._keys_BNTH is None or self._values_BNTH is None:
            batch, heads, _, head_dim = key_BNTH.shape
            self._keys_BNTH = key_BNTH.new_empty(batch, heads, self.max_length, head_dim)
            self._values_BNTH = torch.empty_like(self._keys_BNTH)
        if key_BNTH.shape[0] != self._keys_BNTH.shape[0]:
            raise ValueError(
                f"this memory is of {self._keys_BNTH.shape[0]} texts, not {key_BNTH.shape[0]}: "
                "make another Memory for another batch"
            )
        start, self.length = self.length, self.length + key_BNTH.shape[2]
        self._keys_BNTH[:, :, start : self.length] = key_BNTH
        self._values_BNTH[:, :, start : self.length] = value_BNTH
        return self._keys_BNTH[:, :, : self.length], self._values_BNTH[:, :, : self.length]


class Memory:
    """Of a model, or of the blocks of one segment; `max_length` is at most the model's max_seq_len."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._layers: dict[int, LayerMemory] = {}
        self._last_ids: dict[int, Tensor] = {}

    def before(self, segment: int, ids_BT: Tensor, reach: int) -> Tensor | None:
        """Up to `reach` tokens before these ids, for a segment that remembers them; None at the beginning."""
        before_BP = self._last_ids.get(segment)
        seen_BS = ids_BT if before_BP is None else torch.cat((before_BP, ids_BT), dim=1)
        self._last_ids[segment] = seen_BS[:, max(0, seen_BS.shape[1] - reach) :]
        return before_BP

    def layer(self, block: int) -> LayerMemory:
        return self._layers.setdefault(block, LayerMemory(self.max_length))

    @property
    def length(self) -> int:
        """Tokens that have passed every block so far: the position of the next one."""
        return min((layer.length for layer in self._layers.values()), default=0)


def attend(
    query_BNTH: Tensor, key_BNTH: Tensor, value_BNTH: Tensor, memory: LayerMemory | None, dropout: float = 0.0
) -> Tensor:
    """Causal attention of new tokens to themselves and to those in `memory`, which takes the new ones in."""
    if memory is not None:
        key_BNTH, value_BNTH = memory.extend(key_BNTH, value_BNTH)
    new, seen = query_BNTH.shape[2], key_BNTH.shape[2]
    # `is_causal` lines up the first query with the first key, which is right only if there is nothing before the
    # query. The last token sees everything and needs no mask at all.
    mask_TT = None
    if new not in (1, seen):
        mask_TT = torch.ones(new, seen, dtype=torch.bool, device=query_BNTH.device).tril(seen - new)
    with _fast_precision(query_BNTH, seen) as dtype:
        mixed_BNTH = F.scaled_dot_product_attention(
            query_BNTH.to(dtype),
            key_BNTH.to(dtype),
            value_BNTH.to(dtype),
            attn_mask=mask_TT,
            dropout_p=dropout,
            is_causal=new == seen,
            enable_gqa=key_BNTH.shape[1] != query_BNTH.shape[1],
        )
    return mixed_BNTH.to(query_BNTH.dtype)


@contextmanager
def _fast_precision(query_BNTH: Tensor, seen: int) -> Iterator[torch.dtype]:
    """float32 in the place of bfloat16 for short texts on CPUs, where torch 2.13 is slower in bfloat16.

    See benchmarks/attention.py. When tokens are generated too, or they would differ from a text that is read at once:
    a memory of so few tokens is converted again for each of them.
    """
    slow = query_BNTH.device.type == "cpu" and query_BNTH.dtype == torch.bfloat16
    if not slow or seen > LONGEST_IN_FLOAT32:
        yield query_BNTH.dtype
        return
    with torch.autocast("cpu", enabled=False):
        yield torch.float32
