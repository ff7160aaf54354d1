"""Sizes of a model on a model hub are known from the headers of its files, before any weights are downloaded."""

import json
from dataclasses import replace

import pytest

from tests.huggingface.model_hub import model_hub
from tests.huggingface.models import save_model, small_config
from tests.huggingface.run_files import run_of
from thinpipe.config.toml import dump_toml

NAME = "someone/small"
MACHINES = '[[machine]]\nname = "here"\ndevice = "RTX 3060"\ncount = 4\n'


def asked_for(asked, method):
    return {file for how, file in asked if how == method}


@pytest.mark.parametrize("shard", ["100KB", "1GB"])
def test_a_run_that_is_too_large_is_refused_before_a_download(shard, tune_tokens, tmp_path, programs):
    save_model(small_config("qwen3"), tmp_path / "base", shard=shard)
    config = run_of(f"hf:{NAME}", tune_tokens, tmp_path / "run")
    long = replace(config, training=replace(config.training, seq_len=1 << 24))
    (tmp_path / "long.toml").write_text(dump_toml(long))
    with model_hub(NAME, tmp_path / "base") as (environment, asked):
        environment |= {"HF_HOME": str(tmp_path / "cache")}
        program = programs("train", "train", tmp_path / "long.toml", environment=environment)
        assert program.finish() == 2, program.printed
    assert "the run needs" in program.printed
    weights = {path.name for path in (tmp_path / "base").glob("*.safetensors")}
    assert len(weights) > 1 or shard == "1GB"
    assert asked_for(asked, "part") == weights
    assert "config.json" in asked_for(asked, "GET")
    assert not weights & asked_for(asked, "GET")
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]


def test_a_plan_by_headers_is_that_of_the_files(tune_tokens, tmp_path, programs):
    """Of a base in fp32, which its config.json does not say: by that alone the download would be half as long."""
    save_model(small_config("qwen3"), tmp_path / "base")
    config_file = tmp_path / "base" / "config.json"
    stated = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({key: value for key, value in stated.items() if "dtype" not in key}))
    (tmp_path / "machines.toml").write_text(MACHINES)
    plans = []
    with model_hub(NAME, tmp_path / "base") as (environment, asked):
        for name, source in (("folder", tmp_path / "base"), ("hub", f"hf:{NAME}")):
            config = run_of(source, tune_tokens, tmp_path / name, degree=4)
            (tmp_path / f"{name}.toml").write_text(dump_toml(config))
            command = ("plan", tmp_path / f"{name}.toml", "--machines", tmp_path / "machines.toml", "--json")
            program = programs(name, *command, environment=environment | {"HF_HOME": str(tmp_path / "cache")})
            assert program.finish() == 0, program.printed
            plans.append(json.loads(program.printed.splitlines()[-1]))
    assert plans[0] == plans[1]
    assert not {path.name for path in (tmp_path / "base").glob("*.safetensors")} & asked_for(asked, "GET")
