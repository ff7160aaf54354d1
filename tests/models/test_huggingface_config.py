"""config.json to our configuration: both generations of its layout, its defaults, and what we refuse to load."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinpipe.core.errors import UserError
from thinpipe.models import GPT2Config, LlamaConfig, ModelConfig, RopeScaling
from thinpipe.models.hf.weights import load_config

LLAMA = LlamaConfig(
    vocab_size=61, dim=32, n_layers=3, n_heads=4, n_kv_heads=4, hidden_dim=48, max_seq_len=96, rope_theta=10_000.0
)
LLAMA3 = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
GPT2 = GPT2Config(vocab_size=61, dim=32, n_layers=3, n_heads=4, max_seq_len=96, dropout=0.1, tied=True)

LLAMA_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}
GPT2_JSON: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 96,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_JSON: dict[str, Any] = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def write_config(folder: Path, stored: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_JSON}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_JSON}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000, **LLAMA3_JSON}},
    ],
)
def test_both_layouts_of_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, {**LLAMA_JSON, **rope}))
    assert config == replace(LLAMA, rope_theta=500_000.0, rope_scaling=LLAMA3)
    theirs = pytest.importorskip("transformers").AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters == {**theirs.rope_parameters, "rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_JSON}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (LLAMA_JSON, LLAMA),
        ({**LLAMA_JSON, "rms_norm_eps": None}, replace(LLAMA, norm_eps=1e-6)),
        ({**LLAMA_JSON, "rope_scaling": None, "rope_theta": 10000, "head_dim": 8}, LLAMA),
        ({**LLAMA_JSON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, LLAMA),
        (GPT2_JSON, GPT2),
        ({**GPT2_JSON, "n_inner": 128, "activation_function": "gelu_pytorch_tanh"}, GPT2),
    ],
)
def test_what_a_config_leaves_out_is_the_default_of_transformers(
    stored: dict[str, Any], expected: ModelConfig, tmp_path: Path
) -> None:
    assert load_config(write_config(tmp_path, stored)) == expected


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA_JSON, {"model_type": "mistral"}, "model_type 'mistral' is not supported, only llama and gpt2"),
        (LLAMA_JSON, {"attention_bias": True}, "attention_bias = true is not supported, only false: use a model"),
        (LLAMA_JSON, {"mlp_bias": True}, "mlp_bias = true is not supported, only false: use a model trained"),
        (LLAMA_JSON, {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported, only "silu": use a model'),
        (LLAMA_JSON, {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported, only 0.0: set it so"),
        (LLAMA_JSON, {"head_dim": 16}, "head_dim 16 is not supported, only hidden_size / num_attention_heads = 32 / 4"),
        (LLAMA_JSON, {"quantization_config": {"bits": 4}}, r'quantization_config = {"bits": 4} is not supported'),
        (LLAMA_JSON, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (LLAMA_JSON, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported, only default and"),
        (LLAMA_JSON, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1.0"),
        (LLAMA_JSON, {"rope_scaling": {"rope_type": "llama3"}}, "factor is missing: add it, with the value"),
        (LLAMA_JSON, {"hidden_size": None}, "hidden_size is missing: add it, with the value"),
        (LLAMA_JSON, {"hidden_size": "32"}, "hidden_size should be a whole number above 0, not '32'"),
        (LLAMA_JSON, {"num_attention_heads": 0}, "num_attention_heads should be a whole number above 0, not 0"),
        (LLAMA_JSON, {"rms_norm_eps": True}, "rms_norm_eps should be a number, not True"),
        (LLAMA_JSON, {"tie_word_embeddings": 1}, "tie_word_embeddings should be true or false, not 1"),
        (LLAMA_JSON, {"num_key_value_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        (GPT2_JSON, {"n_inner": 64}, "n_inner = 64 is not supported, only 4 n_embd = 128: use a model"),
        (GPT2_JSON, {"activation_function": "relu"}, 'only "gelu_new" or "gelu_pytorch_tanh": use a model'),
        (GPT2_JSON, {"scale_attn_weights": False}, "scale_attn_weights = false is not supported, only true"),
        (GPT2_JSON, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true is not supp"),
        (GPT2_JSON, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true is not supported, only false:"),
        (GPT2_JSON, {"add_cross_attention": True}, "add_cross_attention = true is not supported, only false"),
        (GPT2_JSON, {"attn_pdrop": 0.0}, "'attn_pdrop': 0.0} is not supported, only one rate for all three"),
    ],
)
def test_a_config_that_we_cannot_compute(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_config(write_config(tmp_path, base | change))
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UserError, "config.json does not exist: give a folder"),
        ("{", UserError, "config.json is not valid JSON"),
        ("[1]", UserError, "config.json should hold a JSON object, not a list"),
    ],
)
def test_a_folder_without_a_config(content: str | None, error: type[Exception], message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=message):
        load_config(tmp_path)
