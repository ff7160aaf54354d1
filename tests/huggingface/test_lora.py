"""Adapters in segments: peft's numbers, names and files; a run that trains them alone."""

import json
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.huggingface.models import save_model, small_config
from tests.huggingface.runs import BATCH, LORA, MICROBATCH, batch, run_config
from thinpipe.checkpoint import CheckpointFolder, new_manifest
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.layer_plan import UnsupportedModelError
from thinpipe.models.hf.lora import save_adapter
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.training.engine import Engine

CUTS = (2, 4, 6)


def adapted(folder, lora=LORA, cuts=CUTS, dtype=torch.float32, seed=0):
    model = HuggingFaceModel(replace(read_model(folder, cuts), lora=lora))
    for segment in model.segments:
        segment.materialise(seed=seed, dtype=dtype)
    return model


def adapters_of(model):
    plan = model.segments[0].plan
    return {plan.huggingface_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def test_first_values_depend_on_the_seed_and_not_on_the_cuts(tmp_path):
    save_model(small_config("qwen3"), tmp_path)
    one, four, other = (adapters_of(adapted(tmp_path, **how)) for how in ({"cuts": ()}, {}, {"seed": 1}))
    assert list(one) == list(four)
    assert all(torch.equal(one[name], four[name]) for name in one)
    drawn = [name for name in one if ".lora_A." in name]
    assert len(drawn) == 8 * 7
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert len({one[name].sum().item() for name in drawn}) == len(drawn)
    assert not any(p.any() for name, p in one.items() if ".lora_B." in name)


def test_the_base_is_in_bfloat16_and_adapters_in_float32(tmp_path):
    save_model(small_config("qwen3"), tmp_path)
    model = adapted(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in adapters_of(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_trains_the_adapters_alone_and_saves_nothing_else(precision, tmp_path):
    save_model(small_config("qwen3"), tmp_path)
    engine = Engine(run_config("exact", precision=precision), replace(read_model(tmp_path, CUTS), lora=LORA))
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    losses = [engine.step(step, batch(512), lr=1e-2).loss for step in range(5)]
    assert losses[-1] < losses[0]
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(engine.parameters) == {name for name in before if "lora" in name}
    saved = {name.split(":")[0] for layer in engine.state(with_space=True).values() for name in layer}
    assert saved == changed


def test_a_checkpoint_of_adapters_continues_bit_for_bit(tmp_path):
    """The base is read again from its own folder, and is no part of the checkpoint."""
    save_model(small_config("qwen3"), tmp_path / "base")
    config = replace(read_model(tmp_path / "base", CUTS), lora=LORA)
    first = Engine(run_config("exact"), config)
    for step in range(2):
        first.step(step, batch(512, step), lr=1e-2)
    saved = CheckpointFolder(tmp_path / "checkpoints").save(
        new_manifest(first.model, step=2), first.state(with_space=True)
    )
    assert saved.manifest.model["lora"]["r"] == LORA.r
    second = Engine(run_config("exact"), config)
    second.restore(saved)
    outcomes = [engine.step(2, batch(512, 2), lr=1e-2) for engine in (first, second)]
    assert outcomes[0].loss == outcomes[1].loss
    assert all(torch.equal(p, second.parameters[name]) for name, p in first.parameters.items())


def test_the_folder_of_an_adapter_opens_with_peft_and_gives_the_same_logits(tmp_path):
    folder = tmp_path / "base"
    save_model(small_config("qwen3"), folder)
    engine = Engine(run_config("exact"), replace(read_model(folder, CUTS), lora=LORA))
    for step in range(3):
        engine.step(step, batch(512), lr=1e-2)
    save_adapter(engine.model, adapters_of(engine.model), tmp_path / "adapter")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8, 0.1)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(adapters_of(engine.model))
    ids, state = torch.from_numpy(batch(512, 9))[:, :-1], None
    engine.model.eval()
    with torch.no_grad():
        for segment in engine.model.segments:
            state = segment(ids, state)
        assert torch.equal(opened(input_ids=ids, use_cache=False).logits, state)
        with opened.disable_adapter():
            assert not torch.equal(opened(input_ids=ids, use_cache=False).logits, state)


def test_a_tied_head_costs_nothing_while_both_copies_are_frozen(tmp_path):
    """Every gradient is that of peft on the whole model, over several micro-batches."""
    whole = save_model(small_config("qwen3", tie_word_embeddings=True), tmp_path)
    lora = replace(LORA, lora_dropout=0.0)
    engine = Engine(run_config("exact"), replace(read_model(tmp_path, CUTS), lora=lora))
    engine.runner.gradients(0, torch.from_numpy(batch(512)).split(MICROBATCH))
    found = {engine.model.segments[0].huggingface_name(name): p for name, p in engine.parameters.items()}
    theirs = peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"), whole
    )
    wanted = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])
    for ids in torch.from_numpy(batch(512)).split(MICROBATCH):
        logits = theirs(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses.mean().backward()
    assert all(torch.equal(found[name].grad, p.grad / (BATCH // MICROBATCH)) for name, p in wanted.items())


@pytest.mark.parametrize("targets", [("lm_head", "q_proj"), ("embed_tokens",), ("no_such_layer",)])
def test_adapters_outside_of_the_blocks_are_refused(targets, tmp_path):
    save_model(small_config("qwen3", tie_word_embeddings=False), tmp_path)
    with pytest.raises(UnsupportedModelError):
        adapted(tmp_path, LoraConfig(target_modules=targets))
