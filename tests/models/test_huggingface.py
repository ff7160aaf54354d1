"""Models cross between thinpipe and transformers without a change in logits; a folder that does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.test_huggingface_config import GPT2_JSON, LLAMA3_JSON, LLAMA_JSON
from thinpipe.core.errors import UserError
from thinpipe.models import (
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    RopeScaling,
    SubspaceConfig,
    build,
    materialise,
)
from thinpipe.models.hf.weights import load_config, load_weights, save

transformers = pytest.importorskip("transformers")

LLAMA = LlamaConfig(
    vocab_size=61, dim=32, n_layers=3, n_heads=4, n_kv_heads=4, hidden_dim=48, max_seq_len=96, rope_theta=10_000.0
)
GPT2 = GPT2Config(vocab_size=61, dim=32, n_layers=3, n_heads=4, max_seq_len=96, dropout=0.1, tied=True)
# The positions of a text reach far beyond the original length, so that the stretched frequencies show in the logits.
LLAMA3 = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)

OURS: dict[str, ModelConfig] = {
    "llama": replace(LLAMA, norm_eps=1e-3, init_std=0.1, rope_theta=500_000.0),
    "llama-tied": replace(LLAMA, tied=True),
    "llama-gqa-llama3": replace(LLAMA, n_kv_heads=2, rope_scaling=LLAMA3),
    "gpt2-tied": replace(GPT2, norm_eps=1e-3, init_std=0.1, dropout=0.25),
    "gpt2-untied": replace(GPT2, tied=False, dropout=0.0),
}

THEIRS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_JSON, "rms_norm_eps": 1e-3, "initializer_range": 0.1, "rope_theta": 500_000.0},
    "llama-tied": {**LLAMA_JSON, "tie_word_embeddings": True},
    "llama-gqa-llama3": {
        **LLAMA_JSON,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **LLAMA3_JSON},
    },
    "gpt2-tied": {
        **GPT2_JSON,
        "layer_norm_epsilon": 1e-3,
        "initializer_range": 0.1,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.25),
    },
    "gpt2-untied": {
        **GPT2_JSON,
        "tie_word_embeddings": False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
CASES = list(OURS)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Large weights and no zero bias or unit norm left: every tensor and every position shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def their_model(case: str) -> Any:
    stored = THEIRS[case]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**stored)).eval()
    randomise(model)
    return model


def our_model(config: ModelConfig) -> Model:
    model = materialise(build(config), seed=0).eval()
    randomise(model)
    return model


def loaded(folder: Path, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32) -> Model:
    model = materialise(build(config or load_config(folder)), seed=0, dtype=dtype, draw=False).eval()
    load_weights(model, folder)
    return model


def token_ids() -> Tensor:
    return torch.randint(61, (2, 90), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def difference(ours: nn.Module, theirs: Any) -> float:
    """The largest difference of two logits, relative to the largest logit."""
    expected = theirs(token_ids()).logits
    return float((ours(token_ids()) - expected).abs().max() / expected.abs().max())


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    expected = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A case, transformers' model of it, and the folder that transformers wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    model = their_model(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Llama in shards of one or two tensors."""
    folder = tmp_path_factory.mktemp("sharded")
    save(our_model(OURS["llama"]), folder, max_shard_bytes=6_200)
    return folder


def test_their_config_becomes_ours(theirs: tuple[str, Any, Path]) -> None:
    case, _, folder = theirs
    assert load_config(folder) == OURS[case]


def test_their_weights_give_their_logits(theirs: tuple[str, Any, Path]) -> None:
    _, model, folder = theirs
    assert difference(loaded(folder), model) <= 1e-5


def test_their_shards_give_the_same_weights(theirs: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, folder = theirs
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_equal_weights(loaded(tmp_path), loaded(folder))


def test_their_weights_come_back_bit_for_bit(theirs: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, _, folder = theirs
    save(loaded(folder), tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 10_000])
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_our_logits(case: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = our_model(OURS[case])
    save(model, tmp_path, max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes == 10_000)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert difference(model, read.eval()) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_our_model_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    model = our_model(OURS[case])
    save(model, tmp_path, max_shard_bytes=10_000)
    assert load_config(tmp_path) == OURS[case]
    read = loaded(tmp_path)
    assert_equal_weights(read, model)
    assert torch.equal(read(token_ids()), model(token_ids()))


@torch.no_grad()
def test_stretched_frequencies_matter_in_these_tests() -> None:
    stretched, plain = our_model(OURS["llama-gqa-llama3"]), our_model(replace(LLAMA, n_kv_heads=2))
    logits = stretched(token_ids())
    assert float((plain(token_ids()) - logits).abs().max() / logits.abs().max()) > 0.01


def test_shards_keep_to_the_limit_unless_one_tensor_is_larger(llama_folder: Path) -> None:
    index = json.loads((llama_folder / "model.safetensors.index.json").read_text())
    files = sorted(llama_folder.glob("*.safetensors"))
    shards = [load_file(path) for path in files]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert all(size <= 6_200 or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    assert {name: path.name for path, shard in zip(files, shards, strict=True) for name in shard} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_take_the_dtype_of_the_model_and_keep_it_in_the_folder(dtype: torch.dtype, tmp_path: Path) -> None:
    save(our_model(GPT2), tmp_path / "float32")
    model = loaded(tmp_path / "float32", dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    save(model, tmp_path / "other")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other").dtype == dtype
    assert_equal_weights(loaded(tmp_path / "other", dtype=dtype), model)


@pytest.mark.parametrize("case", ["gpt2-tied", "llama-tied"])
def test_names_without_the_base_prefix_beside_tensors_that_nobody_needs(case: str, tmp_path: Path) -> None:
    model = our_model(OURS[case])
    save(model, tmp_path)
    mask = {"h.0.attn.bias": torch.ones(1, 1, 96, 96)}  # as in the first files of GPT-2
    rewrite(tmp_path, lambda tensors: {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()} | mask)
    assert_equal_weights(loaded(tmp_path), model)


def rewrite(folder: Path, change: Any) -> None:
    """Replaces the tensors of a whole file by what `change` makes of them."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def write_config(folder: Path, stored: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}


def with_narrow_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"][:16].clone()}


def with_another_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", without_norm, "has no tensor model.norm.weight: use a folder with a whole causal language model"),
        ("llama", without_head, "has no tensor lm_head.weight: use a folder with a whole causal language model"),
        ("llama", with_narrow_norm, r"model.norm.weight is \(16,\), but last.norm.weight is \(32,\): build the model"),
        ("llama-tied", with_another_head, "lm_head.weight differs from model.embed_tokens.weight, .* set tied = false"),
    ],
)
def test_tensors_that_do_not_fit(case: str, change: Any, message: str, tmp_path: Path) -> None:
    save(our_model(OURS[case]), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message) as refused:
        loaded(tmp_path)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2, "needs a LlamaConfig, not a GPT2Config: use load_config"),
        (replace(OURS["llama"], n_layers=2), "has n_layers = 3, the model 2: build it from load_config"),
        (replace(OURS["llama"], n_heads=8, n_kv_heads=8), "has n_heads = 4, the model 8: build it from load_config"),
    ],
)
def test_a_folder_of_another_model(config: ModelConfig, message: str, llama_folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        loaded(llama_folder, config)


def test_a_tied_model_takes_a_folder_that_stores_the_same_head_twice(tmp_path: Path) -> None:
    model = our_model(OURS["llama-tied"])
    save(model, tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_equal_weights(loaded(tmp_path), model)


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("pytorch_model.bin", b"", UserError, "weights only in pytorch_model.bin, a pickle.* convert it with"),
        ("readme.md", b"", UserError, "has neither model.safetensors nor .*index.json: download the weights"),
        ("model.safetensors", b"cut short", UserError, "model.safetensors is not whole .* download it again"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}',
            UserError,
            "has no file model-00001-of-00002.safetensors, which its index names: download it as well",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"model.embed_tokens.weight": "../elsewhere.safetensors"}}',
            UserError,
            "has no file ../elsewhere.safetensors",
        ),
        ("model.safetensors.index.json", b"{}", UserError, "has no tensor model.embed_tokens.weight"),
    ],
)
def test_files_that_cannot_be_read(
    file: str, content: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(61, 32)}, tmp_path / "elsewhere.safetensors")
    (write_config(folder, LLAMA_JSON) / file).write_bytes(content)
    with pytest.raises(error, match=message) as refused:
        loaded(folder)
    assert str(folder) in str(refused.value)


def test_an_index_that_names_the_wrong_file(llama_folder: Path, tmp_path: Path) -> None:
    for path in llama_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"cannot read model.norm.weight from .*: download the folder again"):
        loaded(tmp_path)


def test_a_subspace_model_neither_loads_nor_saves(llama_folder: Path, tmp_path: Path) -> None:
    subspace = SubspaceConfig(width=4, free_last=False)
    model = our_model(replace(OURS["llama"], subspace=subspace))
    with pytest.raises(TypeError, match="this is a subspace model: load the weights into a dense model"):
        load_weights(model, llama_folder)
    with pytest.raises(TypeError, match="this is a subspace model: convert it with to_dense first"):
        save(model, tmp_path)


def test_a_model_without_memory_neither_loads_nor_saves(llama_folder: Path, tmp_path: Path) -> None:
    model = build(OURS["llama"])
    with pytest.raises(ValueError, match=r"no memory yet: call materialise\(...\) first"):
        load_weights(model, llama_folder)
    with pytest.raises(ValueError, match="no memory yet"):
        save(model, tmp_path)


def test_weights_are_not_written_beside_others(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    for folder, file in ((llama_folder, "model-00001-of-"), (tmp_path, "pytorch_model.bin")):
        with pytest.raises(UserError, match=rf"already has weights \({file}.*choose another folder"):
            save(our_model(LLAMA), folder)
