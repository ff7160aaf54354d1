"""The probe: passes what is right, finds a class that is broken on purpose, and names what differs."""

import json

import msgspec
import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from tests.huggingface.models import HANDFUL, default_config
from thinpipe.cli import main
from thinpipe.models.hf import probe_cache
from thinpipe.models.hf.probe import ProbeResult, probe


@pytest.mark.parametrize("model_type", HANDFUL)
def test_segments_of_common_models_equal_the_whole_bit_for_bit(model_type):
    result = probe(default_config(model_type))
    assert result.refusal is None
    assert all(result.works(name) for name in ("losses", "gradients", "recomputation", "LoRA", "packing", "dropout"))


def test_a_block_that_depends_on_more_than_its_input_is_found_and_named(monkeypatch):
    """The third block adds what the first one has seen in this pass, which is in another segment."""
    right, model_forward, seen = modeling_llama.LlamaDecoderLayer.forward, modeling_llama.LlamaModel.forward, {}

    def wrong(self, hidden_states, *args, **kwargs):
        index = self.self_attn.layer_idx
        if index == 0:
            seen["first"] = hidden_states.mean()
        return right(self, hidden_states, *args, **kwargs) + (seen.get("first", 0.0) if index == 2 else 0.0)

    def begin(self, *args, **kwargs):
        seen.clear()
        return model_forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", wrong)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", begin)
    assert probe(default_config("llama")).refusal.startswith("the state after model.layers.3 differs")


def test_a_gradient_that_differs_is_named_by_its_parameter(monkeypatch):
    """All outputs are right, and gradients of one layer are doubled if all blocks are in one process."""
    mlp_forward, model_forward, whole = modeling_gemma2.Gemma2MLP.forward, modeling_gemma2.Gemma2Model.forward, {}

    def begin(self, *args, **kwargs):
        whole["is"] = all(isinstance(block, modeling_gemma2.Gemma2DecoderLayer) for block in self.layers)
        whole["mlp"] = self.layers[3].mlp
        return model_forward(self, *args, **kwargs)

    def wrong(self, x):
        out = mlp_forward(self, x)
        return 2 * out - out.detach() if whole["is"] and self is whole["mlp"] else out

    monkeypatch.setattr(modeling_gemma2.Gemma2MLP, "forward", wrong)
    monkeypatch.setattr(modeling_gemma2.Gemma2Model, "forward", begin)
    result = probe(default_config("gemma2"))
    assert result.works("losses")
    assert not result.works("gradients")
    assert result.refusal.startswith("the gradient of model.")


def test_a_table_that_no_segment_owns_is_named(monkeypatch):
    made = modeling_llama.LlamaModel.__init__

    def with_table(self, config):
        made(self, config)
        self.shared_table = torch.nn.Embedding(4, 4)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", with_table)
    assert "model.shared_table.weight" in probe(default_config("llama")).refusal


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_5_text"])
def test_packing_that_leaks_is_found(model_type):
    result = probe(default_config(model_type))
    assert result.refusal is None
    assert not result.works("packing")


def test_a_config_is_tried_with_its_own_choices():
    assert "output_router_logits" in probe(default_config("mixtral", output_router_logits=True)).refusal
    changed = default_config("llama", num_key_value_heads=1, attention_bias=True, tie_word_embeddings=True)
    result = probe(changed)
    biases, usual = (int(gradients(each).split()[0]) for each in (result, probe(default_config("llama"))))
    assert result.refusal is None
    assert biases == usual + 8 * 4 - 1  # a bias for each of four matrices in 8 blocks, and one table less


def gradients(result):
    return next(check.detail for check in result.checks if check.name == "gradients")


def test_results_are_kept_by_config_and_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("THINPIPE_STATE_FOLDER", str(tmp_path))
    calls = []
    kept = ProbeResult(model_type="llama", checks=())
    monkeypatch.setattr(probe_cache, "probe", lambda stored: calls.append(stored) or kept)
    stored = default_config("llama")
    assert probe_cache.probed(stored) == probe_cache.probed(stored) == kept
    assert len(calls) == 1
    probe_cache.probed({**stored, "hidden_act": "gelu"})
    assert len(calls) == 2
    monkeypatch.setattr(probe_cache, "version", lambda _package: "99")
    probe_cache.probed(stored)
    assert len(calls) == 3
    probe_cache.probe_path(stored).write_text("{")
    probe_cache.probed(stored)
    assert len(calls) == 4


def test_the_command_prints_a_table_and_needs_no_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(default_config("qwen2")))
    assert main(["probe", str(tmp_path)]) == 0
    assert "qwen2: can be trained in segments" in capsys.readouterr().out
    assert main(["probe", str(tmp_path), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ProbeResult).refusal is None


def test_the_command_refuses_with_the_reason_and_downloads_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(default_config("gemma3")))
    assert main(["probe", str(tmp_path), "--json"]) == 1
    assert "wraps a language model" in capsys.readouterr().out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["probe", "someone/no-such-model"]) == 2
    assert "nothing is downloaded" in capsys.readouterr().err
