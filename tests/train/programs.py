"""Commands of thinpipe in processes of their own: what they print, and what a run comes to."""

import os
import re
import subprocess
import sys
import time

import pytest

from thinpipe.checkpoint import CheckpointFolder
from thinpipe.core.events import Step, read_events

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A command of thinpipe, here or at a place of `tests.swarm.homes`, or another `module`; and what it prints."""

    def __init__(self, folder, name, *arguments, place=None, module="thinpipe", environment=None):
        folder.mkdir(parents=True, exist_ok=True)
        prefix = [] if place is None else ["ip", "netns", "exec", place.namespace]
        self.output = folder / f"{name}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *map(str, arguments)],
                env=ENVIRONMENT | (environment or {}),
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


def invites_of(hub):
    """The lines that a hub prints at its start."""
    hub.until("another invite: ")
    return re.findall(r"thinpipe1:\S+", hub.printed)


def run_to_end(*arguments, path=None, seconds=60):
    """(exit code, all that it printed). `path`: where Python finds another thinpipe."""
    environment = ENVIRONMENT if path is None else {**ENVIRONMENT, "PYTHONPATH": f"{path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-m", "thinpipe", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done.returncode, done.stdout + done.stderr


def files_of(config, step):
    """sha256 of everything that a checkpoint holds."""
    folder = CheckpointFolder(config.job.dump_folder / "checkpoints")
    return {name: entry.sha256 for name, entry in folder.open(step).manifest.files.items()}


def steps_of(config):
    return [event for event in read_events(config.job.dump_folder / "events.jsonl") if isinstance(event, Step)]
