"""Attention of short texts in bfloat16 on a CPU is computed in float32, and only there."""

import pytest
import torch
import torch.nn.functional as F

from thinpipe.config.model_family import MAX_FLOAT32_ATTENTION_TOKENS
from thinpipe.models.kv_cache import LayerKVCache, attend


def heads(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, count, tokens, 16).to(dtype) for count in (4, 2, 2))


def causal(query, key, value, dtype):
    parts = (part.to(dtype) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).to(query.dtype)


@pytest.mark.parametrize(("tokens", "dtype"), [(32, torch.float32), (MAX_FLOAT32_ATTENTION_TOKENS + 1, torch.bfloat16)])
def test_the_precision_depends_on_the_length(tokens, dtype):
    parts = heads(tokens)
    found = attend(*parts, None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, causal(*parts, dtype))


def test_autocast_does_not_take_it_back():
    parts = heads(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(*parts, None)
    assert torch.equal(found, causal(*parts, torch.float32))
    assert not torch.equal(found, causal(*parts, torch.bfloat16))


def test_a_new_token_and_a_whole_text_agree():
    query, key, value = heads(8)
    cache = LayerKVCache(8)
    with torch.no_grad():
        pieces = [attend(query[:, :, t : t + 1], key[:, :, t : t + 1], value[:, :, t : t + 1], cache) for t in range(8)]
    torch.testing.assert_close(torch.cat(pieces, 2).float(), attend(query, key, value, None).float(), atol=2e-2, rtol=0)
