"""Decoding with a memory gives the logits of one full forward pass, however the text arrives."""

from dataclasses import replace

import pytest
import torch

from thinpipe.models import (
    ExecutionConfig,
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    RopeScaling,
    SubspaceConfig,
    build,
    materialise,
)
from thinpipe.models.kv_cache import KVCache

# Weights large enough that attention is far from uniform; frequencies that are stretched within these 24 positions.
SCALING = RopeScaling(factor=4.0, original_max_position_embeddings=8)
LLAMA = LlamaConfig(
    vocab_size=96,
    dim=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=80,
    max_seq_len=24,
    init_std=0.3,
    rope_theta=10_000.0,
    rope_scaling=SCALING,
)
GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=4, n_heads=4, max_seq_len=24, init_std=0.3)
SUBSPACE = SubspaceConfig(width=6, fixed_std=0.3)
CONFINED = replace(SUBSPACE, free_last=False)
SHAPES = {
    "dense": {},
    "dense-cut": {"boundaries": (1, 3)},
    "subspace": {"subspace": CONFINED},
    "subspace-cut": {"boundaries": (1, 3), "subspace": CONFINED},
    "subspace-cut-free": {"boundaries": (1, 3), "subspace": SUBSPACE},
}
FAMILIES: dict[str, ModelConfig] = {"llama": LLAMA, "gpt2": GPT2}
CONFIGS = {f"{family}-{shape}": replace(FAMILIES[family], **SHAPES[shape]) for family in FAMILIES for shape in SHAPES}
IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96
ARRIVALS = {"prefill then one by one": [9, *[1] * 15], "one by one": [1] * 24, "in pieces": [5, 6, 1, 8, 4]}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Model:
    return materialise(build(CONFIGS[name]), seed=1, dtype=dtype).eval()


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_give_the_logits_of_the_whole(name: str, arrival: str) -> None:
    model, cache = model_of(name), KVCache(24)
    logits = []
    for piece in IDS.split(ARRIVALS[arrival], dim=1):
        logits.append(model(piece, cache))
        assert cache.length == sum(part.shape[1] for part in logits)
    assert worst(torch.cat(logits, dim=1), model(IDS)) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_chunk_is_bit_for_bit_that_without_kv_cache(name: str) -> None:
    model = model_of(name, torch.float32)
    assert torch.equal(model(IDS[:, :9], KVCache(24)), model(IDS[:, :9]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-dense-cut", "gpt2-subspace-cut", "gpt2-subspace-cut-free"])
@pytest.mark.parametrize("shared", [True, False])
def test_segments_may_run_ahead_and_hold_kv_caches_of_their_own(name: str, shared: bool) -> None:
    """As in a pipeline: each segment works through all pieces before the next one starts."""
    model, one = model_of(name), KVCache(24)
    pieces = IDS.split([9, 1, 14], dim=1)
    states: list[torch.Tensor | None] = [None] * len(pieces)
    for segment in model.segments:
        cache = one if shared else KVCache(24)
        states = [segment(piece, state, cache) for piece, state in zip(pieces, states, strict=True)]
        assert cache.length == 24
    logits = torch.cat([state for state in states if state is not None], dim=1)
    assert worst(logits, model(IDS)) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-dense", "gpt2-dense", "gpt2-subspace-cut"])
def test_no_room_is_said_before_anything_is_computed(name: str) -> None:
    model, cache, short = model_of(name), KVCache(24), KVCache(10)
    model(IDS[:, :22], cache)
    model(IDS[:, :10], short)
    with pytest.raises(ValueError, match="25 tokens do not fit into max_seq_len 24"):
        model(IDS[:, :3], cache)
    with pytest.raises(
        ValueError, match="11 tokens do not fit into a KV cache of 10: make one of up to max_seq_len 24"
    ):
        model(IDS[:, :1], short)
    with pytest.raises(ValueError, match="25 tokens do not fit into max_seq_len 24"):
        model(IDS[:, [*range(24), 0]])
    assert (cache.length, short.length) == (22, 10)
    assert worst(model(IDS[:, 22:], cache), model(IDS)[:, 22:]) <= 1e-12


def test_kv_cache_refuses_gradients_and_another_batch() -> None:
    model, cache = model_of("llama-dense"), KVCache(24)
    with pytest.raises(ValueError, match=r"decode inside torch.no_grad\(\)"):
        model(IDS, cache)
    with torch.no_grad():
        model(IDS[:, :4], cache)
        with pytest.raises(ValueError, match="of 2 texts, not 1: make another KVCache"):
            model(IDS[:1, 4:5], cache)
    assert cache.length == 4


@torch.no_grad()
def test_execution_settings_do_not_change_the_kv_cache() -> None:
    model, cache = model_of("llama-subspace-cut-free", torch.float32), KVCache(24)
    model.set_execution(ExecutionConfig(checkpoint_activations="block"), autocast_bf16=True)
    logits = torch.cat([model(piece, cache) for piece in IDS.split([20, 1, 3], dim=1)], dim=1)
    assert cache.length == 24
    assert cache.layer(0).extend(*[torch.empty(2, 2, 0, 8)] * 2)[0].dtype == torch.bfloat16
    assert worst(logits.float(), model(IDS).float()) <= 0.02
