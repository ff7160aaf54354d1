"""`thinpipe watch`, and runs that show themselves."""

import os
import re
from dataclasses import replace

import httpx
import pytest

from thinpipe.cli import main
from thinpipe.config.run import MetricsConfig
from thinpipe.config.toml import dump_toml
from thinpipe.swarm.hub.run_settings import settings_for_peers
from thinpipe.training.trainer import Trainer


def test_a_run_is_looked_at_once_and_told_to_others(run_config, capsys):
    config = replace(run_config, metrics=MetricsConfig(tensorboard=True, prometheus=0, dashboard=0))
    assert Trainer(config).train() == "finished"
    assert re.search(r"the page of this run is at http://127\.0\.0\.1:\d+/", capsys.readouterr().out)
    assert os.listdir(config.job.dump_folder / "tensorboard")
    assert main(["watch", str(config.job.dump_folder), "--once"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^run +finished$", printed, re.MULTILINE)
    assert "step 12 of 12" in printed
    assert "segment 0-2" in printed


@pytest.mark.timeout(300)
def test_a_run_that_goes_on_is_served(run_config, programs, tmp_path):
    config = replace(run_config, training=replace(run_config.training, steps=100_000))
    (tmp_path / "run.toml").write_text(dump_toml(config))
    training = programs("train", "train", tmp_path / "run.toml", "--metrics.dashboard", 0)
    address = training.until(r"the page of this run is at (http://\S+/)", seconds=180)[1]
    training.until(r"step: +1 ", seconds=180)
    with httpx.stream("GET", f"{address}events", timeout=120) as stream:
        assert any('"state":"running"' in line and '"steps":100000' in line for line in stream.iter_lines())
    training.stop()


def test_peers_do_not_serve_the_hubs_page(run_config):
    config = replace(run_config, metrics=MetricsConfig(log_freq=3, live=True, dashboard=1, prometheus=2, wandb="w"))
    assert settings_for_peers(config).metrics == MetricsConfig(log_freq=3)


def test_what_makes_no_sense_is_refused(tmp_path, capsys):
    for arguments, words in (
        ((tmp_path / "nowhere", "--once"), "there is no folder"),
        ((tmp_path / "nowhere",), f"{tmp_path / 'nowhere'}: name the dump_folder of a run"),
        ((tmp_path, "--once"), "does not exist: name the dump_folder"),
        ((tmp_path, "--once", "--dashboard"), "leave one of them out"),
        ((tmp_path, "--port", "1"), "pass --dashboard"),
    ):
        assert main(["watch", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
