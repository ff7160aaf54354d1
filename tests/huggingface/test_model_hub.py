"""Sizes of a model on a model hub are known from the headers of its files, before any weights are downloaded."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.huggingface.model_hub import COMMIT, model_hub
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


def test_a_model_of_one_file_in_the_cache_needs_no_network(tmp_path):
    cached = tmp_path / "hub" / "models--someone--small"
    for path, text in ((cached / "refs" / "main", COMMIT), (cached / "snapshots" / COMMIT / "model.safetensors", "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    code = f"""if True:
        from thinpipe.models.hf.model_hub import HubModel
        hub = HubModel("{NAME}", None)
        print(hub.files_of(["lm_head.weight"]), hub.weight_files())
    """
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "['model.safetensors'] ['model.safetensors']", done.stderr
