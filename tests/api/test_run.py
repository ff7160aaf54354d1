"""`thinpipe.train` in this process, in a thread and in several processes: events, losses, ends."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import thinpipe
from tests.programs import PATIENCE
from thinpipe.api.settings import run_settings
from thinpipe.boundary.number_format import NumberFormatCompressor
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.config.boundary import COMPRESSION_SETTINGS
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Saved, Started, Step, Stopped
from thinpipe.training.trainer import Trainer

assert PATIENCE  # imported so that `tests/conftest.py` knows that this module starts programs

MACHINES = Path(__file__).parents[2] / "examples/machines.toml"
IN_TWO = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4}


def test_a_run_has_the_losses_of_the_trainer_and_its_callbacks_every_event(run_config, tmp_path, capfd):
    events = []
    run = thinpipe.train(run_config, callbacks=[events.append], quiet=True)
    assert capfd.readouterr().out == ""
    assert (run.stop_reason, run.folder) == ("finished", run_config.job.dump_folder)
    assert run.events() == events
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Stopped)
    other = replace(run_config, job=replace(run_config.job, dump_folder=tmp_path / "other"))
    Trainer(other).train()
    assert run.losses() == thinpipe.Run.open(tmp_path / "other").losses()
    assert run.losses().steps == list(range(1, 13))
    assert run.validation_losses().steps == [6, 12]
    assert run.checkpoint().name == "step-00000012"
    assert thinpipe.Run.open(run.folder) == run


def test_a_run_prints_unless_it_is_quiet(run_config, capfd):
    thinpipe.train(run_config, training={"steps": 4})
    assert "finished" in capfd.readouterr().out


def test_a_thread_can_train(run_config):
    found = []
    thread = threading.Thread(target=lambda: found.append(thinpipe.train(run_config, quiet=True)))
    thread.start()
    thread.join(PATIENCE)
    assert [run.stop_reason for run in found] == ["finished"]


def raising_at(step, kind=Step):
    def callback(event):
        if isinstance(event, kind) and event.step == step:
            raise KeyError("early")

    return callback


@pytest.mark.parametrize("parallelism", [{}, IN_TWO], ids=["one process", "two"])
def test_a_callback_that_raises_ends_the_run_with_a_checkpoint(run_config, parallelism):
    steps = 100_000 if parallelism else 12  # two processes go on until the signal has arrived
    later = []
    callbacks = [raising_at(2), later.append]
    with pytest.raises(KeyError, match="early"):
        thinpipe.train(run_config, callbacks=callbacks, quiet=True, parallelism=parallelism, training={"steps": steps})
    run = thinpipe.Run.open(run_config.job.dump_folder)
    assert run.stop_reason == "signal"
    last = run.losses().steps[-1]
    assert run.checkpoint().name == f"step-{last:08d}"
    assert last == 2 or parallelism
    assert not any(isinstance(event, Saved) for event in later)  # nobody is called after an exception


@pytest.mark.parametrize("parallelism", [{}, IN_TWO], ids=["one process", "two"])
def test_a_callback_that_raises_at_the_end_is_heard_too(run_config, parallelism):
    with pytest.raises(KeyError, match="early"):
        thinpipe.train(run_config, callbacks=[raising_at(12, Stopped)], quiet=True, parallelism=parallelism)
    run = thinpipe.Run.open(run_config.job.dump_folder)
    assert (run.stop_reason, run.checkpoint().name) == ("finished", "step-00000012")


def test_a_callback_that_raises_at_the_start_leaves_a_run_that_can_go_on(run_config, tmp_path):
    with pytest.raises(KeyError, match="early"):
        thinpipe.train(run_config, callbacks=[raising_at(0, Started)], quiet=True)
    assert thinpipe.Run.open(run_config.job.dump_folder).losses().steps == []
    resumed = thinpipe.train(run_config, quiet=True)
    whole = thinpipe.train(run_config, quiet=True, job={"dump_folder": tmp_path / "whole"})
    assert resumed.losses() == whole.losses()


def signalling_at(step, number):
    """Callbacks are called in this process, which is the one that Ctrl+C is for."""

    def callback(event):
        if isinstance(event, Step) and event.step == step:
            signal.raise_signal(number)

    return callback


@pytest.mark.parametrize("parallelism", [{}, IN_TWO], ids=["one process", "two"])
def test_ctrl_c_saves_and_then_interrupts_the_program(run_config, parallelism):
    steps = 100_000 if parallelism else 12
    callbacks = [signalling_at(2, signal.SIGINT), raising_at(3)] if parallelism else [signalling_at(2, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt) as raised:
        thinpipe.train(run_config, callbacks=callbacks, quiet=True, parallelism=parallelism, training={"steps": steps})
    run = thinpipe.Run.open(run_config.job.dump_folder)
    assert run.stop_reason == "signal"
    assert run.checkpoint().name == f"step-{run.losses().steps[-1]:08d}"
    if parallelism:  # a callback that raises after the signal sends no second one to the process that saves
        assert isinstance(raised.value.__context__, KeyError)


def test_sigterm_goes_to_the_handler_that_was_there_before(run_config):
    stopped = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    try:
        run = thinpipe.train(run_config, callbacks=[signalling_at(2, signal.SIGTERM)], quiet=True)
        assert signal.getsignal(signal.SIGTERM)(0, None) is None
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert (run.stop_reason, stopped) == ("signal", [signal.SIGTERM, 0])


@pytest.mark.parametrize("parallelism", [{}, IN_TWO], ids=["one process", "two"])
def test_a_handler_that_python_cannot_restore_is_left_alone(run_config, parallelism, monkeypatch):
    installed = []
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    monkeypatch.setattr(signal, "signal", lambda number, _handler: installed.append(number))
    assert thinpipe.train(run_config, quiet=True, parallelism=parallelism).stop_reason == "finished"
    assert installed == []


def test_a_run_leaves_torch_as_it_found_it(gpt2_config):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = torch.get_rng_state()
        for deterministic in (False, True):
            thinpipe.train(gpt2_config, quiet=True, training={"steps": 4}, debug={"deterministic": deterministic})
            assert torch.equal(torch.get_rng_state(), before)
            assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_quiet_prints_no_settings_either(run_config, capfd):
    thinpipe.train(run_config, quiet=True, training={"steps": 4}, job={"print_config": True})
    assert capfd.readouterr().out == ""


UNDER_TORCHRUN = """
import os, sys
import torch.distributed as dist
import thinpipe
config, has_group = sys.argv[1], sys.argv[2] == "group"
if has_group:
    dist.init_process_group("gloo")
    assert thinpipe.train(config, quiet=True).stop_reason == "finished"
    dist.barrier()
try:
    thinpipe.train(config, quiet=True, data={"path": "nowhere"})
except thinpipe.UserError as error:
    assert os.environ["RANK"] == "0" and "process 0: " in str(error), error
except thinpipe.RunFailedError:
    assert os.environ["RANK"] == "1"
else:
    sys.exit("there is no such data")
assert dist.is_initialized() == has_group
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", ["group", "none"])
def test_under_torchrun_a_group_of_the_caller_stays_and_none_is_left_behind(run_config, tmp_path, group):
    config = run_settings(run_config, {"parallelism": IN_TWO, "training": {"steps": 4}})
    (tmp_path / "run.toml").write_text(dump_toml(config))
    (tmp_path / "program.py").write_text(UNDER_TORCHRUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launcher, str(tmp_path / "program.py"), str(tmp_path / "run.toml"), group]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes_have_the_losses_of_one_and_print_nothing_when_quiet(run_config, tmp_path, capfd):
    one = thinpipe.train(run_config, quiet=True)
    events = []
    folder = {"dump_folder": tmp_path / "two"}
    two = thinpipe.train(run_config, callbacks=[events.append], quiet=True, parallelism=IN_TWO, job=folder)
    assert two.stop_reason == "finished"
    assert two.losses() == one.losses()
    assert two.events() == events
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_launched_process_is_raised_here(run_config):
    with pytest.raises(thinpipe.UserError, match="process 0: "):
        thinpipe.train(run_config, quiet=True, parallelism=IN_TWO, data={"path": "nowhere"})


def test_a_process_that_is_killed_is_named(run_config):
    def kill(event):
        if isinstance(event, Step) and event.step == 2:
            children = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children"
            with open(children) as file:
                os.kill(max(map(int, file.read().split())), 9)

    with pytest.raises(thinpipe.RunFailedError, match=r"was ended by SIGKILL"):
        thinpipe.train(run_config, callbacks=[kill], quiet=True, parallelism=IN_TWO, training={"steps": 100_000})


def test_no_run_is_a_user_error(tmp_path):
    with pytest.raises(thinpipe.UserError, match="there is no run in"):
        thinpipe.Run.open(tmp_path)


def test_adapters_are_an_override_like_any_other():
    config = run_settings(thinpipe.RunConfig(), {"model": {"hf": "a-model"}, "lora": {"r": 4}})
    assert (config.model.hf, config.lora.r) == ("a-model", 4)
    with pytest.raises(thinpipe.UserError, match=r"\[lora\] adapts a Hugging Face model: set model.hf"):
        run_settings(thinpipe.RunConfig(), {"lora": {"r": 4}})


def test_overrides_change_keys_and_leave_the_others(run_config, tmp_path):
    changed = run_settings(run_config, {"model": {"subspace": {"width": 8}}, "job": {"dump_folder": tmp_path}})
    assert changed.model.subspace == replace(run_config.model.subspace, width=8)
    assert replace(changed, model=run_config.model, job=run_config.job) == run_config
    assert changed.job.dump_folder == tmp_path
    assert run_settings(run_config, {"model": {"subspace": {"width": None}}}).model.subspace.width is None
    boundary = thinpipe.BoundaryConfig(forward="int8")
    assert run_settings(run_config, {"boundary": boundary}).boundary is boundary
    assert run_settings("preset:default", {}) == run_settings("preset:default", {"training": {}})


def test_fewer_steps_shorten_a_warmup_that_was_not_given(run_config):
    config = replace(run_config, lr_scheduler=replace(run_config.lr_scheduler, warmup_steps=8))
    with pytest.warns(UserWarning, match=r"5 steps .* the warm-up of 8: lr_scheduler.warmup_steps is 0 in this run"):
        assert run_settings(config, {"training": {"steps": 5}}).lr_scheduler.warmup_steps == 0
    with pytest.raises(thinpipe.UserError, match="warmup_steps 7 must be below"):
        run_settings(config, {"training": {"steps": 5}, "lr_scheduler": {"warmup_steps": 7}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trianing": {"steps": 1}}, "unknown key trianing: did you mean training?"),
        ({"training": {"stepz": 1}}, "unknown key stepz: did you mean steps?"),
        ({"training": {"steps": "many"}}, "steps: expected int, got str"),
        ({"training": None}, "dictionary of the keys to change, or a TrainingConfig, in place of None"),
        ({"training": thinpipe.BoundaryConfig()}, "or a TrainingConfig, in place of a BoundaryConfig"),
    ],
)
def test_a_wrong_override_is_refused(run_config, overrides, message):
    with pytest.raises(thinpipe.UserError) as refused:
        run_settings(run_config, overrides)
    assert message in str(refused.value)


def test_numbers_of_numpy_are_numbers(run_config):
    changed = run_settings(run_config, {"training": {"steps": np.int64(7)}, "optimizer": {"lr": np.float32(0.5)}})
    assert (changed.training.steps, changed.optimizer.lr) == (7, 0.5)
    assert run_settings(run_config, {"model": {"boundaries": np.array([1, 2])}}).model.boundaries == (1, 2)


@pytest.fixture
def registered(monkeypatch):
    """A compressor of this program alone."""
    monkeypatch.setitem(COMPRESSORS, "halves", NumberFormatCompressor)
    monkeypatch.setitem(COMPRESSION_SETTINGS, "halves", ())
    return thinpipe.BoundaryConfig(states=thinpipe.CompressionConfig(kind="halves"))


def test_a_registered_compressor_is_refused_where_nobody_knows_it(run_config, registered):
    def refused(call, *arguments, **settings):
        with pytest.raises(thinpipe.UserError, match=r"'halves' was registered in this program, and .* cannot know it"):
            call(*arguments, **settings)

    refused(run_settings, run_config, {"boundary": {"states": {"kind": "halves"}}})
    refused(thinpipe.train, run_config, boundary=registered, parallelism=IN_TWO, quiet=True)
    refused(thinpipe.plan, run_config, MACHINES, boundary=registered)
