"""Segments of a Hugging Face model: what they read, hold and refuse, and that memory options change no bit."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.huggingface.models import default_config, save_model, small_config
from thinpipe.config.model import ExecutionConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf import decoder
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.hollow import build_on_meta
from thinpipe.models.hf.layer_plan import UnsupportedModelError, find_plan
from thinpipe.models.hf.pretrained_config import describe, read_model, transformers_config

CUTS = (2, 4, 6)


def segments_of(folder, cuts=CUTS):
    model = HuggingFaceModel(read_model(folder, cuts))
    for segment in model.segments:
        segment.materialise(seed=0)
    return model.train()


def gradients_of(model, ids, **options):
    for parameter in model.parameters():
        parameter.grad = None
    state = None
    for segment in model.segments:
        state = segment(ids[:, :-1], state, targets_BT=ids[:, 1:], **options)
    state.mean().backward()
    return state.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt2", "mixtral"])
def test_only_the_first_segment_reads_token_ids(model_type, tmp_path):
    """The others compute the same whatever their ids are, the last one its losses from labels alone."""
    save_model(small_config(model_type, tie_word_embeddings=False), tmp_path)
    model = segments_of(tmp_path)
    assert not model.config.segments_need_ids
    ids = torch.randint(3, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    states = [model.segments[0](ids[:, :-1])]
    for segment in model.segments[1:]:
        of_true, of_zeros = (
            segment(given, states[-1].detach(), targets_BT=ids[:, 1:]) for given in (ids[:, :-1], 0 * ids[:, :-1])
        )
        assert torch.equal(of_true, of_zeros)
        states.append(of_true)
    assert not torch.equal(states[0], model.segments[0](0 * ids[:, :-1]))


def test_a_segment_holds_its_own_layers_only(tmp_path):
    """In a process of its own, whose memory is measured by the system."""
    stored = small_config("llama", hidden_size=512, intermediate_size=4096, vocab_size=4096, num_hidden_layers=8)
    save_model(stored, tmp_path, shard="30MB")
    code = (
        "import psutil, sys, torch\n"
        "from pathlib import Path\n"
        "from thinpipe.models.hf.decoder import HuggingFaceModel\n"
        "from thinpipe.models.hf.pretrained_config import read_model\n"
        "model = HuggingFaceModel(read_model(Path(sys.argv[1]), (2, 4, 6)))\n"
        "before = psutil.Process().memory_info().rss\n"
        "segment = model.segments[1].materialise(seed=0)\n"
        "own = sum(p.nbytes for p in segment.parameters())\n"
        "anonymous = psutil.Process().memory_info().rss - before\n"
        "print(own, anonymous)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    own, grown = map(int, done.stdout.split()[-2:])
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert own < whole / 3.5
    assert grown < own + whole / 10  # a tenth for libraries that loading imports


@pytest.mark.parametrize("mode", ["block", "segment"])
def test_activation_checkpointing_changes_no_bit(mode, tmp_path):
    save_model(small_config("gemma3_text"), tmp_path)
    model = segments_of(tmp_path)
    ids = torch.randint(3, 512, (2, 33))
    losses, wanted = gradients_of(model, ids)
    model.set_execution(ExecutionConfig(checkpoint_activations=mode))
    again, found = gradients_of(model, ids)
    assert torch.equal(again, losses)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_losses_in_chunks_differ_by_rounding_only(tmp_path, monkeypatch):
    """Softcaps included, since transformers' own head makes the logits of every chunk."""
    save_model(small_config("gemma2"), tmp_path)
    model = segments_of(tmp_path)
    ids = torch.randint(3, 512, (2, 33))
    losses, wanted = gradients_of(model, ids)
    calls, logits = [], decoder.HuggingFaceSegment._logits
    monkeypatch.setattr(
        decoder.HuggingFaceSegment, "_logits", lambda self, ids, x: calls.append(x.shape[1]) or logits(self, ids, x)
    )
    monkeypatch.setattr(decoder, "MAX_LOGITS", 512 * 10)
    again, found = gradients_of(model, ids)
    assert calls[:7] == [10, 10, 10, 10, 10, 10, 4]
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_dropout_does_not_depend_on_the_cuts_or_on_recomputation(tmp_path):
    """gpt2 drops embeddings, attention weights and outputs."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    save_model(small_config("gpt2", tie_word_embeddings=False, **rates), tmp_path)
    ids = torch.randint(3, 512, (2, 33))
    one, four = segments_of(tmp_path, ()), segments_of(tmp_path)
    _, wanted = gradients_of(one, ids, dropout_seed=5)
    torch.manual_seed(9)
    four.set_execution(ExecutionConfig(checkpoint_activations="block"))
    _, found = gradients_of(four, ids, dropout_seed=5)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    _, other = gradients_of(four, ids, dropout_seed=6)
    assert not any(torch.equal(other[name], wanted[name]) for name in ("first.wte.weight", "last.lm_head.weight"))
    with pytest.raises(ValueError, match="dropout_seed"):
        gradients_of(four, ids)


def test_weights_that_are_missing_are_not_drawn(tmp_path):
    save_model(small_config("llama"), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    segments = HuggingFaceModel(read_model(tmp_path, CUTS)).segments
    segments[0].materialise(seed=0)
    with pytest.raises(UserError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        segments[1].materialise(seed=0)


def test_a_parameter_that_no_segment_would_own_is_refused():
    whole = build_on_meta(transformers_config(small_config("llama")), torch.float32)
    whole.model.shared_bias = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"model\.shared_bias"):
        find_plan(whole)


REFUSED = {
    "output_router_logits": ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "gptq"}}, "already quantised"),
    "own code": ("llama", {"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}, "is not run"),
    "kernel of a hub": ("llama", {"attn_implementation": "someone/kernel"}, "kernel"),
    "encoder": ("bart", {}, "has an encoder"),
    "vision": ("gemma3", {}, "wraps a language model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_in_segments_is_refused_with_its_reason(case):
    model_type, changes, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        describe(default_config(model_type, **changes), "nowhere")


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config("llama")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="a pickle"):
        HuggingFaceModel(read_model(tmp_path)).segments[0].materialise(seed=0)
