"""One run in one folder at a time."""

import errno
import os
import signal
import sys

import pytest

from tests.programs import Program, hub_arguments, invites_of, run_to_end
from thinpipe.config.toml import dump_toml
from thinpipe.core import folder_lock as lock
from thinpipe.core.folder_lock import run_lock


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_run_in_the_same_folder_is_refused(run_config, tmp_path, processes):
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(run_config))
    endless = ("--training.steps", 10**6, "--metrics.log-freq", 1, "--checkpoint.interval", 10**6)
    degree = ("--parallelism.pipeline-parallel-degree", processes)
    first = Program(tmp_path, "first", "train", path, *endless, *degree)
    try:
        first.until(r"step: +1 ", seconds=180)
        second = Program(tmp_path, "second", "train", path)
        assert second.finish() == 2
        assert f"{run_config.job.dump_folder} is in use by another `thinpipe train`" in second.printed
        assert "--job.dump-folder" in second.printed
        first.process.send_signal(signal.SIGINT)
        assert first.finish() == 0
        third = Program(tmp_path, "third", "train", path, "--training.steps", 4)
        assert third.finish() == 0, third.printed
    finally:
        first.stop()


def test_a_hub_and_a_run_keep_each_other_out_and_a_killed_hub_is_followed(run_config, programs, tmp_path):
    path, folder = tmp_path / "run.toml", run_config.job.dump_folder
    path.write_text(dump_toml(run_config))
    hub = programs("hub", *hub_arguments(path, 1))
    invites_of(hub)
    code, printed = run_to_end("train", path)
    assert (code, f"{folder} is in use by another `thinpipe train` or a hub" in printed) == (2, True), printed
    hub.stop()  # SIGKILL
    with run_lock(folder, "the test"):
        code, printed = run_to_end(*hub_arguments(path, 1))
        assert (code, f"{folder} is in use by another hub, or by a `thinpipe train`" in printed) == (2, True), printed
    again = programs("again", *hub_arguments(path, 1))
    invites_of(again)
    again.process.send_signal(signal.SIGINT)
    assert again.finish() == 0, again.printed


@pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX's")
def test_where_files_cannot_be_locked_it_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with run_lock(tmp_path / "run", "nobody") as held:
        assert held is None
    assert f"{tmp_path / 'run'} cannot be locked" in caplog.text
