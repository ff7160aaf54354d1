"""A folded model computes the same logits with dense weights, here and in transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinpipe.models import (
    PRESETS,
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    RopeScaling,
    SubspaceConfig,
    build,
    materialise,
)
from thinpipe.models import to_dense as folding
from thinpipe.models.generate import generate
from thinpipe.models.hf.weights import save
from thinpipe.models.to_dense import to_dense
from thinpipe.subspace import Subspace, coordinates_of

LLAMA = LlamaConfig(
    vocab_size=96,
    dim=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=80,
    max_seq_len=48,
    init_std=0.2,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=8),
)
GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=4, n_heads=4, max_seq_len=48, init_std=0.2)
IDS = torch.arange(2 * 40).view(2, 40) * 7 % 96


def confined(config: ModelConfig, fixed: str, free_last: bool) -> ModelConfig:
    return replace(
        config,
        boundaries=(1, 3),
        subspace=SubspaceConfig(width=6, fixed=fixed, fixed_std=0.3, free_last=free_last),  # type: ignore[arg-type]
    )


CONFIGS = {
    f"{type(config).__name__}-{fixed}-{'free' if free else 'confined'}": confined(config, fixed, free)
    for config in (LLAMA, GPT2)
    for fixed in ("signs", "gaussian")
    for free in (True, False)
}


@torch.no_grad()
def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """No zero bias and no unit norm left: every tensor shows in the logits."""
    model = materialise(build(config), seed=1, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    return model


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", CONFIGS)
def test_to_dense_keeps_the_logits(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = model_of(CONFIGS[name], dtype)
    dense = to_dense(model)
    assert (dense.config.subspace.width, dense.config.boundaries, dense.config.tied) == (None, (), False)
    assert {parameter.dtype for parameter in dense.parameters()} == {dtype}
    assert not any(coordinates_of(parameter) for parameter in dense.parameters())
    assert dense.training is False
    assert worst(dense(IDS), model(IDS)) <= tolerance


@torch.no_grad()
@pytest.mark.parametrize("name", ["LlamaConfig-signs-free", "GPT2Config-gaussian-confined"])
def test_row_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS[name])
    whole = dict(to_dense(model).named_parameters())
    monkeypatch.setattr(folding, "_CHUNK", 5 * 32)
    for parameter_name, parameter in to_dense(model).named_parameters():
        assert worst(parameter, whole[parameter_name]) <= 1e-7, parameter_name


@torch.no_grad()
def test_weights_are_rounded_once() -> None:
    """A bfloat16 model: every entry is the bfloat16 number nearest to what float64 gives."""
    model = model_of(CONFIGS["LlamaConfig-gaussian-confined"]).bfloat16()
    assert isinstance(model.space, Subspace)
    model.space.float()
    dense = to_dense(model)
    basis_DK, table = model.space.basis_DK.double(), model.space.tokens.content().double()
    weights = dict(model.named_parameters())
    written = basis_DK @ weights["blocks.2.mlp.down_proj.weight"].double()
    embedding = table + weights["first.embed_tokens.weight"].double() @ basis_DK.T
    folded = dict(dense.named_parameters())
    assert torch.equal(folded["blocks.2.mlp.down_proj.weight"], written.bfloat16())
    assert torch.equal(folded["first.embed_tokens.weight"], embedding.bfloat16())


def test_to_dense_copies_weights_and_leaves_the_model_unchanged() -> None:
    model = model_of(CONFIGS["GPT2Config-signs-free"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dense = to_dense(model)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.fill_(9.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("config", [LLAMA, replace(GPT2, tied=True), replace(LLAMA, boundaries=(2,))])
def test_a_dense_model_is_returned_as_it_is(config: ModelConfig) -> None:
    model = model_of(config)
    assert to_dense(model) is model


@pytest.mark.parametrize("name", PRESETS)
def test_every_family_says_which_frozen_table_its_embeddings_complete(name: str) -> None:
    config = replace(PRESETS[name], tied=False, subspace=SubspaceConfig(width=8, free_last=False))
    model = build(config)
    embeddings = {
        name
        for name, parameter in model.named_parameters()
        if (mark := coordinates_of(parameter)) is not None and mark.axis == 1
    }
    tables = config.spec.frozen_tables
    assert tables.keys() == embeddings
    assert set(tables.values()) == ({"tokens", "positions"} if config.has_position_table else {"tokens"})
    assert all(getattr(model.space, table) is not None for table in tables.values())


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_generates_the_same_text_from_the_dense_export(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(CONFIGS[name])
    save(to_dense(model), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert worst(theirs(IDS).logits, model(IDS)) <= 1e-4
    prompt = IDS[:1, :8]
    text = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    ours = list(generate(model, prompt[0].tolist(), max_new_tokens=20, temperature=0.0))
    assert text[0, 8:].tolist() == ours
