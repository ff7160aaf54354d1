"""`thinpipe doctor` of a run that trains a Hugging Face model."""

import json
import shutil
from dataclasses import fields, replace

import pytest
from safetensors.torch import load_file, save_file

from tests.huggingface.model_hub import COMMIT, model_hub
from tests.huggingface.models import save_model, small_config
from tests.huggingface.run_files import run_of, words
from thinpipe.cli import main
from thinpipe.config.hub import HubConfig, HubSettings
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.data import Tokenizer
from thinpipe.training.trainer import Trainer


@pytest.fixture
def examine(capsys, tmp_path):
    """The findings on a run by their subject."""

    def examine(config):
        (tmp_path / "run.toml").write_text(dump_toml(config))
        capsys.readouterr()  # what a run has printed before
        code = main(["doctor", str(tmp_path / "run.toml"), "--json"])
        found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert code == int(any(finding["state"] == "problem" for finding in found.values()))
        assert all(finding["fix"] for finding in found.values() if finding["state"] in ("warning", "problem"))
        return found

    return examine


@pytest.fixture
def base(base_of, tmp_path):
    """A base of its own, which may be broken."""
    return shutil.copytree(base_of("qwen3"), tmp_path / "base")


def test_a_good_run(base, tune_tokens, tmp_path, examine):
    config = run_of(base, tune_tokens, tmp_path / "run", degree=4)
    found = examine(config)
    assert {finding["state"] for finding in found.values()} == {"ok"}
    assert [*found][-7:] == ["data", "base", "attention", "quantised base", "who reads", "disk", "memory"]
    assert f"{base}: qwen3, 8 blocks; sha256" in found["base"]["text"]
    assert found["attention"]["text"] == "sdpa, with a fused kernel of torch on cpu"
    assert found["quantised base"]["text"] == "nf4 and int8 by bitsandbytes on cpu"
    assert "for 4 processes" in found["memory"]["text"]
    assert "frozen weights" in found["memory"]["text"]
    assert "the machines with the first and the last segment" in found["who reads"]["text"]
    own = {field.name: getattr(config, field.name) for field in fields(RunConfig)}
    kept = examine(HubConfig(**own, hub=HubSettings(keep_ends=("home", "attic"))))["who reads"]["text"]
    assert "only home and attic" in kept


def test_the_base_that_the_run_began_with(base, tune_tokens, tmp_path, examine):
    config = run_of(base, tune_tokens, tmp_path / "run", cuts=())
    Trainer(config).train()
    assert "step-00000004 has it" in examine(config)["base"]["text"]
    file = sorted(base.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})
    finding = examine(config)["base"]
    assert finding["state"] == "problem"
    assert "was trained on another base" in finding["text"]


def test_what_is_missing_or_does_not_fit(base, tune_tokens, tmp_path, examine):
    config = run_of(base, tune_tokens, tmp_path / "run", "nf4")
    assert examine(config)["quantised base"]["text"] == "nf4 by bitsandbytes on cpu"
    wide = replace(config, training=replace(config.training, global_batch_size=1 << 17))
    wide = replace(wide, parallelism=replace(config.parallelism, pipeline_parallel_microbatch_size=1 << 17))
    assert examine(wide)["memory"]["state"] == "problem"
    tokenizer_file = (base / "tokenizer.json").read_bytes()
    Tokenizer.train(words(50, 500), vocab_size=280).save(base)
    assert "another tokenizer" in examine(config)["base"]["text"]
    (base / "tokenizer.json").write_bytes(tokenizer_file)
    for file in base.glob("*.safetensors"):
        file.unlink()
    found = examine(config)
    assert found["base"]["state"] == "problem"
    assert "no safetensors files" in found["base"]["text"]
    assert found["memory"]["state"] == "ok", "its shapes follow from config.json"


def test_a_base_on_a_model_hub_is_not_downloaded(tune_tokens, tmp_path, programs):
    save_model(small_config("qwen3"), tmp_path / "base")
    config = run_of("hf:someone/small", tune_tokens, tmp_path / "run")
    (tmp_path / "run.toml").write_text(dump_toml(config))
    with model_hub("someone/small", tmp_path / "base") as (environment, asked):
        environment |= {"HF_HOME": str(tmp_path / "cache")}
        program = programs("doctor", "doctor", tmp_path / "run.toml", "--json", environment=environment)
        assert program.finish() == 0, program.printed
    found = {finding["what"]: finding for finding in json.loads(program.printed.splitlines()[-1])}
    assert f"hf:someone/small@{COMMIT}" in found["base"]["text"]
    shards = [*(tmp_path / "base").glob("*.safetensors")]
    assert found["download"]["text"].startswith(f"{len(shards)} file(s) of ")
    assert not {path.name for path in shards} & {file for method, file in asked if method == "GET"}
