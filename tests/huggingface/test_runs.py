"""A run file that names a Hugging Face model: trained, resumed, evaluated, continued, and refused where it must be."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.huggingface.run_files import CUTS, STEPS, run_of, words
from tests.programs import events_of, files_of, train_until
from thinpipe.checkpoint import find_checkpoint, load_model
from thinpipe.cli import main
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import Started, Step, Validated
from thinpipe.data import Tokenizer
from thinpipe.training.trainer import Trainer


def losses_of(config):
    return [event.loss for event in events_of(config, Step)]


@pytest.mark.parametrize("way", ["full", "LoRA", "nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_a_stopped_run_goes_on_bit_for_bit(way, base_of, tune_tokens, tmp_path):
    whole, halves = (run_of(base_of("qwen3"), tune_tokens, tmp_path / name, way) for name in ("whole", "halves"))
    Trainer(whole).train()
    train_until(halves, 2)
    Trainer(halves).train()
    assert losses_of(halves) == losses_of(whole)
    assert files_of(halves, STEPS) == files_of(whole, STEPS)
    started = events_of(halves, Started)
    assert started[1].resumed_from is not None


def test_a_checkpoint_of_adapters_has_no_frozen_weights(base_of, tune_tokens, tmp_path):
    config = run_of(base_of("qwen3"), tune_tokens, tmp_path / "run")
    Trainer(config).train()
    files = sorted((tmp_path / "run" / "checkpoints").rglob("*.safetensors"))
    names = {name for file in files for name in load_file(file)}
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    [started] = events_of(config, Started)
    adapters = {name for name in names if ":" not in name}
    saved = {name: tensor for file in files[: len(files) // 2] for name, tensor in load_file(file).items()}
    assert started.parameters == sum(saved[name].numel() for name in adapters)


def test_another_base_is_refused_with_both_hashes(base_of, tune_tokens, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_of("qwen3"), base)
    config = run_of(base, tune_tokens, tmp_path / "run")
    train_until(config, 2)
    before = find_checkpoint(config.job.dump_folder).manifest.model["base_sha256"]
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    train_until(replace(config, model=replace(config.model, hf=str(moved))), 1)  # the same base elsewhere
    file = sorted(moved.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors[min(tensors)].view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="another base") as refused:
        Trainer(replace(config, model=replace(config.model, hf=str(moved)))).train()
    assert before in str(refused.value)
    assert len(before) == 64


def test_tokens_of_another_tokenizer_are_refused_naming_both(base_of, tune_tokens, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_of("qwen3"), base)
    Tokenizer.train(words(50, 500), vocab_size=280).save(base)
    with pytest.raises(UserError, match="another tokenizer") as refused:
        Trainer(run_of(base, tune_tokens, tmp_path / "run"))
    assert str(base) in str(refused.value)
    assert str(tune_tokens) in str(refused.value)


def test_eval_measures_what_the_run_validated(base_of, tune_tokens, tmp_path, capsys):
    config = run_of(base_of("qwen3"), tune_tokens, tmp_path / "run", boundary=BoundaryConfig(preset="none"))
    Trainer(config).train()
    assert main(["eval", str(tmp_path / "run"), "--max-batches", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["loss"] == pytest.approx(events_of(config, Validated)[-1].loss, rel=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.long), "gpt2"])
def test_a_text_is_continued_as_without_a_cache(model_type, base_of, tune_tokens, tmp_path, capsys):
    config = run_of(base_of(model_type), tune_tokens, tmp_path / "run", cuts=())
    Trainer(config).train()
    capsys.readouterr()
    sampling = ("--prompt", "7 bottles", "--max-new-tokens", "24", "--temperature", "0")
    assert main(["generate", str(tmp_path / "run"), *sampling]) == 0
    printed = capsys.readouterr().out
    model, tokenizer = load_model(find_checkpoint(tmp_path / "run")), Tokenizer.load(tmp_path / "run" / "tokenizer")
    ids = [int(token) for token in tokenizer.encode_batch(["7 bottles"])[0]]
    end = tokenizer.vocabulary.end_of_text_id
    with torch.no_grad():
        for _ in range(24):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == end:
                break
    assert printed.rstrip("\n") in tokenizer.decode(ids)
    assert len(printed) > len("7 bottles")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lora]\nr = 4", "set model.hf"),
        ('[model]\nhf = "x"\nquantize_base = "nf4"', "nothing to train"),
        ('[model]\nquantize_base = "nf4"', "is for Hugging Face models"),
        ('[model]\nhf = "x"\ndim = 8', "leave model.dim out"),
        ('[model]\nhf = "x"\n[lora]\nrank = 8', "unknown key lora.rank"),
        ('[model]\nhf = "x"\n[lora]\nr = 0', "at least 1"),
        ('[model]\nhf = "x"\nquantize_base = "nf5"', "'nf4', 'int8'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(text, message, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_toml(tmp_path / "run.toml", RunConfig)


def test_a_flag_of_lora_makes_a_run_adapt_its_model(base_of, tune_tokens, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run_of(base_of("qwen3"), tune_tokens, tmp_path / "run", "full")))
    assert load_toml(file, RunConfig).lora is None
    assert main(["train", str(file), "--lora.r", "2", "--training.steps", "2"]) == 0
    assert load_toml(tmp_path / "run" / "run.toml", RunConfig).lora == LoraConfig(r=2)


def test_a_context_beyond_the_models_is_refused(base_of, tune_tokens, tmp_path):
    config = run_of(base_of("gpt2", n_positions=12), tune_tokens, tmp_path / "run", cuts=CUTS)
    with pytest.raises(UserError, match="max_seq_len 12: lower"):
        Trainer(config)
