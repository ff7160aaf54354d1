"""`thinpipe hub`, `join`, `up`, `status` and `kick` as people use them: real processes, a real server."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.train.test_processes import files_of, steps_of
from thinpipe.core.config import dump_toml
from thinpipe.train.config import JobSection
from thinpipe.train.loop import Trainer

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A command of thinpipe and what it prints."""

    def __init__(self, folder, name, *arguments):
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / f"{name}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinpipe", *map(str, arguments)],
                env=ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def printed(self):
        return self.output.read_text()

    def until(self, pattern, seconds=90):
        """The first match, once it is printed."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.printed):
                return found
            assert not ended, f"ended with {self.process.returncode}: {self.printed[-3000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} in: {self.printed[-3000:]}"
            time.sleep(0.05)

    def finish(self, seconds=120):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {self.printed[-3000:]}")

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def programs(tmp_path):
    """Starts commands, and ends what a test leaves."""
    started = []

    def start(name, *arguments):
        started.append(Program(tmp_path / "printed", name, *arguments))
        return started[-1]

    yield start
    for program in started:
        program.stop()


@pytest.fixture
def run_config(run_config):
    """Three segments, and micro-batches for three peers."""
    return replace(run_config, parallelism=replace(run_config.parallelism, pipeline_parallel_microbatch_size=2))


@pytest.fixture
def hosted(run_config, tmp_path):
    """The same run in another folder, and its file."""
    config = replace(run_config, job=JobSection(dump_folder=tmp_path / "hosted"))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    return config, file


def invites_of(hub, count):
    hub.until(rf"(?s)(thinpipe1:\S+.*){{{count}}}")
    return re.findall(r"thinpipe1:\S+", hub.printed)


@pytest.mark.timeout(240)
def test_up_trains_to_the_weights_of_one_process(run_config, hosted, programs):
    Trainer(run_config).train()
    config, file = hosted
    up = programs("up", "up", file, "--peers", 3)
    assert up.finish() == 0, up.printed
    assert "finished" in up.printed
    assert files_of(config, 12) == files_of(run_config, 12)
    assert [step.loss for step in steps_of(config)] == [step.loss for step in steps_of(run_config)]
