"""One run in one folder at a time."""

import signal

import pytest

from tests.train.programs import Program
from thinpipe.core.config import dump_toml


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
