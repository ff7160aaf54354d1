"""Commands of thinpipe in processes of their own: what they print, and what a run comes to.

Waits end with what they wait for, on a slow machine too: PATIENCE is for what never comes.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.warm import WarmProcess, run_warm
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Step, read_events
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer

PATIENCE = 600
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A command of thinpipe, here or at a place of `tests.swarm.network_namespaces`, or another `module`; and what it
    prints."""

    def __init__(self, folder, name, *arguments, place=None, module="thinpipe", environment=None):
        folder.mkdir(parents=True, exist_ok=True)
        prefix = [] if place is None else ["ip", "netns", "exec", place.namespace]
        self.output = folder / f"{name}.out"
        environment = ENVIRONMENT | (environment or {})
        with self.output.open("wb") as output:
            if place is None:
                self.process = WarmProcess(module, *arguments, env=environment, stdout=output, process_group=0)
            else:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", module, *map(str, arguments)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )

    @property
    def printed(self):
        return self.output.read_text()

    def until(self, pattern, seconds=PATIENCE):
        """The first match, once it is printed."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.printed):
                return found
            assert not ended, f"ended with {self.process.returncode}: {self.printed[-3000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} in: {self.printed[-3000:]}"
            time.sleep(0.05)

    def finish(self, seconds=PATIENCE):
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
    return re.findall(r"^thinpipe3:\S+", hub.printed, re.MULTILINE)


def hub_arguments(file, peers, *more, heartbeat_timeout=120):
    """Nobody is taken for lost because the machine is slow."""
    return (
        *("hub", file, "--hub.peers", peers, "--hub.use-all-peers", "--hub.address", "127.0.0.1"),
        *("--hub.heartbeat-timeout-seconds", heartbeat_timeout, "--hub.stall-floor-seconds", heartbeat_timeout, *more),
    )


def train_with_hub(programs, config, devices, environment=None):
    """`thinpipe hub` for the run, and `thinpipe join` for every one of its devices, to the end."""
    folder = config.job.dump_folder
    file = folder.with_suffix(".toml")
    file.write_text(dump_toml(config))
    fast = ("--hub.up", "1gbps", "--hub.down", "1gbps")  # so that nobody measures it
    hub = programs("hub", *hub_arguments(file, len(devices), *fast), environment=environment)
    joined = []
    for invite, device in zip(invites_of(hub), devices, strict=True):
        name = f"peer{len(joined)}"
        where = ("--folder", folder.with_name(name), "--device", device)
        joined.append(programs(name, "join", invite, *where, environment=environment))
    for program in (hub, *joined):
        assert program.finish() == 0, "\n".join(each.printed[-3000:] for each in (hub, *joined))


def run_to_end(*arguments, path=None, seconds=PATIENCE):
    """(exit code, all that it printed). `path`: where Python finds another thinpipe."""
    if path is None:
        done = run_warm("thinpipe", *arguments, env=ENVIRONMENT, timeout=seconds)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "thinpipe", *map(str, arguments)],
            env={**ENVIRONMENT, "PYTHONPATH": f"{path}{os.pathsep}{os.getcwd()}"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    return done.returncode, done.stdout + done.stderr


class _UntilStep(RunEnvironment):
    def __init__(self, step):
        self._left = step

    @contextmanager
    def step(self):
        self._left -= 1
        yield

    def asked_to_stop(self):
        return self._left <= 0


def train_until(config, step):
    """In this process, to a step that need not be the run's last: so another may run for as long as its test takes."""
    Trainer(config, run_environment=_UntilStep(step)).train()


def newest_step(config):
    return CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()[0].manifest.step


def files_of(config, step):
    """sha256 of everything that a checkpoint holds."""
    folder = CheckpointFolder(config.job.dump_folder / "checkpoints")
    return {name: entry.sha256 for name, entry in folder.open(step).manifest.files.items()}


def events_of(config, *kinds):
    """Events of these kinds in the log of a run, in order; none while there is no log."""
    path = config.job.dump_folder / "events.jsonl"
    return [event for event in read_events(path) if isinstance(event, kinds)] if path.exists() else []


def wait_for_event(config, kind, *, after=None, seconds=PATIENCE, **fields):
    """The first event of this kind with these fields, once it is in the log, later than the event `after`."""
    deadline = time.monotonic() + seconds
    while True:
        events = events_of(config, object)
        for event in events[0 if after is None else events.index(after) + 1 :]:
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                return event
        assert time.monotonic() < deadline, f"no {kind.__name__} with {fields} in: {events[-20:]}"
        time.sleep(0.05)


def steps_of(config):
    return [event for event in read_events(config.job.dump_folder / "events.jsonl") if isinstance(event, Step)]
