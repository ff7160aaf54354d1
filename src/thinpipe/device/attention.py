"""Which attention kernel torch runs in training on a device, and what that means for memory.

Fused kernels keep the log-sum-exp of each row of scores; the math kernel keeps the tokens x tokens scores of each head.
On CUDA grouped queries (fewer heads of keys and values than of queries) run fused in the flash kernel only, which wants
bfloat16 or float16 and a card of sm80 or later: elsewhere torch falls back to the math kernel, although its
memory-efficient kernel would run if keys and values were repeated for every head. On MPS torch has fused kernels for
inference alone. This module asks torch instead of keeping a table of cards.
"""

from functools import lru_cache
from typing import Literal

import torch
from torch.nn.attention import SDPBackend

_PROBE_TOKENS = 16


@lru_cache
def attention_kernel(
    device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int
) -> Literal["fused", "fused-repeated", "math"]:
    """Kernel for causal attention in training, with keys and values repeated if that avoids the math kernel; the names
    are those of `config.model_family.AttentionKernel`."""
    if not _is_math(device, dtype, heads, kv_heads, head_dim):
        return "fused"
    if kv_heads != heads and not _is_math(device, dtype, heads, heads, head_dim):
        return "fused-repeated"
    return "math"


def _is_math(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    query_BNTH, key_BNTH = (
        torch.empty(1, count, _PROBE_TOKENS, head_dim, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads)
    )
    try:
        chosen = torch._fused_sdp_choice(query_BNTH, key_BNTH, key_BNTH, is_causal=True, enable_gqa=heads != kv_heads)
    except NotImplementedError:  # of a device without fused kernels torch is not asked
        return True
    return chosen == SDPBackend.MATH.value
