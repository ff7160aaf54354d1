"""A run that does not fit is refused before anything is made, with what would make it fit; on the CPU without torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.training import memory_check
from thinpipe.training.launch import train
from thinpipe.training.observer import Observer

HUGE = {"dim": 2**13, "hidden_dim": 2**18, "n_heads": 64, "n_kv_heads": 64}


def huge(config, **training):
    training = {"device": "cpu", **training}
    return replace(config, model=replace(config.model, **HUGE), training=replace(config.training, **training))


def test_a_run_that_is_too_large_is_refused_before_its_folder_is_made(run_config):
    with pytest.raises(UserError, match=r"the run needs .* of memory on the CPU") as refused:
        train(huge(run_config), Observer(quiet=True))
    said = str(refused.value)
    for words in ("can be used", "optimiser state", "what would make it fit", "training.check_memory = false"):
        assert words in said
    assert not run_config.job.dump_folder.exists()


def test_the_refusal_takes_no_torch_and_a_second(run_config, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(huge(run_config)))
    code = (
        "import sys, time; from thinpipe.cli import main; "
        f"code = main(['train', {str(tmp_path / 'run.toml')!r}]); "
        "print(time.process_time()); sys.exit(3 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, "the run needs" in done.stderr) == (2, True)
    assert float(done.stdout.splitlines()[-1]) < 2.0  # processor time, half of it for slower machines


def test_the_check_can_be_switched_off(run_config, monkeypatch):
    monkeypatch.setattr(memory_check, "free_host_nbytes", lambda: 1000)
    few = replace(
        run_config,
        training=replace(run_config.training, steps=2, device="cpu"),
        lr_scheduler=replace(run_config.lr_scheduler, warmup_steps=1),
    )
    with pytest.raises(UserError, match="the run needs"):
        train(few, Observer(quiet=True))
    train(replace(few, training=replace(few.training, check_memory=False)), Observer(quiet=True))


def test_all_processes_of_this_machine_are_counted(run_config, monkeypatch):
    several = replace(
        run_config,
        parallelism=replace(run_config.parallelism, pipeline_parallel_degree=2),
        training=replace(run_config.training, device="cpu"),
    )
    monkeypatch.setattr(memory_check, "free_host_nbytes", lambda: 500_000_000)
    with pytest.raises(UserError, match=r"memory for 2 processes on the CPU .* Python and torch 800 MB"):
        memory_check.check_before_torch(several)
    monkeypatch.setattr(memory_check, "free_host_nbytes", lambda: 2_000_000_000)
    memory_check.check_before_torch(several)


def test_an_accelerator_that_torch_cannot_have_is_one_line_without_torch(run_config, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(run_config))
    code = (
        "import sys; from thinpipe.cli import main; "
        f"code = main(['train', {str(tmp_path / 'run.toml')!r}, '--training.device', 'cuda']); "
        "sys.exit(3 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, "thinpipe: there is no device 'cuda' here: write auto, cpu\n")
