"""Exported folders, as transformers and peft open them."""

import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.huggingface.models import default_config, save_model
from tests.huggingface.run_files import LORA, run_of
from thinpipe.checkpoint import find_checkpoint, load_model
from thinpipe.cli import main
from thinpipe.cli.export_model import run
from thinpipe.config.commands import ExportConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf import export
from thinpipe.models.hf.quantised import quantisation
from thinpipe.models.hf.shrink import shrink
from thinpipe.training.trainer import Trainer

IDS = torch.arange(3, 43).view(2, 20)
LEARNS = {"r": 4, "lora_alpha": 64}
"""Adapters that change logits in a few steps."""


def exported(config, output, *flags):
    assert main(["export", str(config.job.dump_folder), str(output), *flags]) == 0
    return output


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def ours(config):
    with torch.no_grad():
        return load_model(find_checkpoint(config.job.dump_folder))(IDS)


def trained(base, tokens, folder, way, **changes):
    config = run_of(base, tokens, folder, way, **changes)
    config = config if config.lora is None else replace(config, lora=replace(LORA, **LEARNS))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-2))
    Trainer(config).train()
    return config


def opened(folder, quantised=None):
    how = (
        {}
        if quantised is None
        else {"quantization_config": quantisation(quantised, torch.device("cpu"), torch.float32)}
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


@pytest.mark.parametrize(("model_type", "is_tied"), [("qwen3", False), ("gemma3_text", True), ("mixtral", False)])
def test_all_weights_open_with_transformers(model_type, is_tied, base_of, tune_tokens, tmp_path):
    """A tied head that a cut has untied is written, and named in config.json, as one of its own."""
    base = base_of(model_type, tie_word_embeddings=is_tied)
    config = trained(base, tune_tokens, tmp_path / "run", "full")
    folder = exported(config, tmp_path / "out")
    assert torch.equal(logits_of(opened(folder)), ours(config))
    before, after = (json.loads((place / "config.json").read_text()) for place in (base, folder))
    changed = {"tie_word_embeddings"} if is_tied else set()
    assert {key for key in before if before[key] != after.get(key)} == changed
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (base / file).read_bytes()


@pytest.mark.parametrize(
    ("model_type", "way"),
    [("qwen3", "LoRA"), ("gpt2", "LoRA"), ("gemma3_text", "nf4"), ("gpt2", "nf4"), ("qwen3", "int8")],
)
def test_adapter_and_merged_model_open_with_peft_and_transformers(
    model_type, way, base_of, tune_tokens, tmp_path, monkeypatch
):
    """The adapter gives the run's logits bit for bit, merged weights those of peft's own merge."""
    monkeypatch.setattr(export, "SHARD_NBYTES", 60_000)
    base = base_of(model_type)
    config = trained(base, tune_tokens, tmp_path / "run", way)
    quantised = config.model.quantize_base
    adapted = peft.PeftModel.from_pretrained(opened(base, quantised), exported(config, tmp_path / "adapter"))
    found = logits_of(adapted)
    assert torch.equal(found, ours(config))
    with adapted.disable_adapter():
        assert (logits_of(adapted) - found).abs().max() > 0.1
    merged = exported(config, tmp_path / "merged", "--merge")
    assert len(list(merged.glob("model-*.safetensors"))) > 5
    close = 0.05 if way == "int8" else 1e-4  # int8 rounds inputs too, which no merged model does
    assert (logits_of(opened(merged)) - found).abs().max() < close
    assert (merged / "config.json").read_bytes() != b""
    if quantised is None:
        theirs, own = adapted.merge_and_unload().state_dict(), opened(merged).state_dict()
        assert max((theirs[name] - own[name]).abs().max() for name in own) < 1e-6


def test_exported_again_an_adapter_is_the_same(base_of, tune_tokens, tmp_path):
    """There and back: the weights of the checkpoint, by peft's names."""
    config = trained(base_of("qwen3"), tune_tokens, tmp_path / "run", "LoRA")
    tensors = load_file(exported(config, tmp_path / "adapter") / "adapter_model.safetensors")
    layers = sorted((find_checkpoint(config.job.dump_folder).path).glob("blocks.*.safetensors"))
    saved = {name: tensor for file in layers for name, tensor in load_file(file).items() if ":" not in name}
    assert len(saved) == len(tensors) == 8 * 7 * 2
    for name, tensor in saved.items():
        theirs = name.replace("blocks.", "base_model.model.model.layers.").replace(".default", "")
        assert torch.equal(tensors[theirs], tensor)


def test_merging_with_another_base_is_refused(base_of, tune_tokens, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_of("qwen3"), base)
    config = trained(base, tune_tokens, tmp_path / "run", "LoRA")
    shutil.rmtree(base)
    save_model(shrink(default_config("qwen3")), base, seed=1)
    assert main(["export", str(config.job.dump_folder), str(tmp_path / "out"), "--merge"]) == 2
    assert not (tmp_path / "out" / "config.json").exists()


# peft looks for the patterns of experts among modules, although they are for parameters.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_experts_that_are_merged_on_loading_are_left_to_peft(base_of, tune_tokens, tmp_path, capsys):
    """What the base stores under other names is refused by name, not left out."""
    config = run_of(base_of("mixtral"), tune_tokens, tmp_path / "run")
    with pytest.raises(UserError, match="does not work with lora_dropout"):
        Trainer(config)
    config = replace(config, lora=replace(LORA, lora_dropout=0.0))
    Trainer(config).train()
    names = peft.PeftModel.from_pretrained(opened(base_of("mixtral")), exported(config, tmp_path / "adapter"))
    assert torch.equal(logits_of(names), ours(config))
    code = main(["export", str(config.job.dump_folder), str(tmp_path / "merged"), "--merge"])
    if code == 0:
        assert (logits_of(opened(tmp_path / "merged")) - ours(config)).abs().max() < 1e-4
    else:
        assert "merge_and_unload" in capsys.readouterr().err


def test_merge_is_for_adapters(base_of, tune_tokens, tmp_path):
    config = run_of(base_of("qwen3"), tune_tokens, tmp_path / "run", "full")
    Trainer(config).train()
    with pytest.raises(UserError, match="--merge is for a run with"):
        run(ExportConfig(run=tmp_path / "run", output=tmp_path / "out", merge=True))
