"""Dropout: masks by seed and layer, the same when computed again, and attention whose weights can be dropped."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from thinpipe.models import ExecutionConfig, GPT2Config, SubspaceConfig, build, materialise
from thinpipe.models.kv_cache import LayerKVCache, attend

GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=3, n_heads=4, max_seq_len=24, dropout=0.2, boundaries=(1,))
CONFINED = replace(GPT2, subspace=SubspaceConfig(width=6))
IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


def losses(model, seeds):
    """Of a micro-batch per seed, all computed forward before the first goes backward, as 1F1B does."""
    model.zero_grad()
    logits = [model(IDS, dropout_seed=seed) for seed in seeds]
    found = [F.cross_entropy(each.flatten(0, 1), IDS.roll(-1, 1).flatten()) for each in logits]
    for loss in found:
        loss.backward()
    return found, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["block", "segment"])
@pytest.mark.parametrize("config", [GPT2, CONFINED], ids=["dense", "subspace"])
def test_recomputed_blocks_drop_the_same(config, checkpointing):
    model = materialise(build(config), seed=1)
    plain, gradients = losses(model, (3, 4))
    model.set_execution(ExecutionConfig(checkpoint_activations=checkpointing))
    again, gradients_again = losses(model, (3, 4))
    assert plain == again
    assert plain[0] != plain[1]
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def test_torchs_generator_is_neither_read_nor_moved():
    model = materialise(build(GPT2), seed=1)
    torch.manual_seed(1)
    before, state = losses(model, (3,))[0], torch.get_rng_state()
    torch.manual_seed(2)
    assert losses(model, (3,))[0] == before
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_layer_of_every_block_drops_otherwise(monkeypatch):
    words = []

    def spy(x, rate, *of_mask):
        assert rate == 0.2
        words.append((of_mask, tuple(x.shape)))
        return x

    monkeypatch.setattr("thinpipe.models.decoder.dropout", spy)
    materialise(build(GPT2), seed=1)(IDS, dropout_seed=3)
    assert len({of_mask for of_mask, _ in words}) == len(words) == 1 + 3 * GPT2.n_layers
    assert [shape for _, shape in words] == [(2, 24, 32), *[(2, 4, 24, 24), (2, 24, 32), (2, 24, 32)] * GPT2.n_layers]


def test_dropout_wants_a_seed_in_training_only():
    model = materialise(build(GPT2), seed=1)
    with pytest.raises(ValueError, match=r"dropout is on: pass dropout_seed, or call model.eval\(\) first"):
        model(IDS)
    with pytest.raises(ValueError, match="dropout is on"):
        model.segments[1](IDS, torch.zeros(2, 24, 32))
    exact = materialise(build(replace(GPT2, dropout=0.0)), seed=1)(IDS)
    assert torch.equal(model.eval()(IDS), exact)


@pytest.mark.parametrize("seen", [0, 1, 9])
@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_that_drops_nothing_is_torchs(kv_heads, new, seen):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, seen + new, 8, generator=generator, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads)
    )
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    cache = LayerKVCache(16)
    if seen:
        cache.extend(key[:, :, :seen], value[:, :, :seen])
    mixed = attend(*(each[:, :, seen:] for each in (query, key, value)), cache, drop=lambda weights: weights)
    torch.testing.assert_close(mixed, whole[:, :, seen:], rtol=1e-12, atol=1e-12)


def test_attention_drops_weights_after_their_softmax():
    """Half of the weights, at known places: those of odd tokens."""
    query = key = value = torch.eye(6).view(1, 1, 6, 6)
    even = (torch.arange(6) % 2 == 0).float()
    mixed = attend(query, key, value, None, drop=lambda weights: weights * even)
    weights = attend(query, key, value, None)  # the values are unit vectors
    torch.testing.assert_close(mixed, weights * even)


def test_attention_in_bfloat16_is_computed_in_float32():
    query, key, value = (torch.linspace(i, i + 3, 2 * 8 * 16).sin().view(1, 2, 8, 16).bfloat16() for i in range(3))
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(query, key, value, None, drop=lambda weights: seen.append(weights.dtype) or weights)
    assert (seen, mixed.dtype) == ([torch.float32], torch.bfloat16)
    torch.testing.assert_close(mixed, attend(query, key, value, None), rtol=1e-2, atol=1e-2)
