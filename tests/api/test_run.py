"""`thinpipe.train` in this process, in a thread and in several processes: events, losses, ends."""

import os
import threading
from dataclasses import replace

import pytest

import thinpipe
from tests.programs import PATIENCE
from thinpipe.api.settings import run_settings
from thinpipe.core.events import Saved, Started, Step, Stopped
from thinpipe.training.trainer import Trainer

assert PATIENCE  # imported so that `tests/conftest.py` knows that this module starts programs

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


def raising_at(step):
    def callback(event):
        if isinstance(event, Step) and event.step == step:
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
    assert last == 3 or parallelism
    assert not any(isinstance(event, Saved) for event in later)  # nobody is called after an exception


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


def test_overrides_change_keys_and_leave_the_others(run_config, tmp_path):
    changed = run_settings(run_config, {"model": {"subspace": {"width": 8}}, "job": {"dump_folder": tmp_path}})
    assert changed.model.subspace == replace(run_config.model.subspace, width=8)
    assert replace(changed, model=run_config.model, job=run_config.job) == run_config
    assert changed.job.dump_folder == tmp_path
    assert run_settings(run_config, {"model": {"subspace": {"width": None}}}).model.subspace.width is None
    boundary = thinpipe.BoundaryConfig(forward="int8")
    assert run_settings(run_config, {"boundary": boundary}).boundary is boundary
    assert run_settings("preset:default", {}) == run_settings("preset:default", {"training": {}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trianing": {"steps": 1}}, "unknown key trianing: did you mean training?"),
        ({"training": {"stepz": 1}}, "unknown key stepz: did you mean steps?"),
        ({"training": {"steps": "many"}}, "steps: expected int, got str"),
    ],
)
def test_a_wrong_override_is_refused(run_config, overrides, message):
    with pytest.raises(thinpipe.UserError) as refused:
        run_settings(run_config, overrides)
    assert message in str(refused.value)
