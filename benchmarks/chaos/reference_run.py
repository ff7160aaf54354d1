"""The same run without any fault, in one process: sha256 of every layer at every commit, loss and norm of every step.

    python -m benchmarks.chaos.reference_run RUN.toml STEP

goes on to that step from wherever it was, and appends what it saves to `reference.jsonl` beside the file.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.chaos.config import ChaosConfig
from benchmarks.chaos.processes import Program
from benchmarks.chaos.workload import numbers_sha256, run_config
from thinpipe.checkpoint import Checkpoint
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Saved, Step, read_events
from thinpipe.core.run_folder import events_path
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer

_LOOK_SECONDS, _PROGRESS_SECONDS = 0.2, 30.0
_QUIET_SECONDS = 300.0


class ReferenceCommit(msgspec.Struct, frozen=True):
    step: int
    files: dict[str, str]


class ReferenceRun:
    """Of the settings of a chaos run, as far as it was computed."""

    def __init__(self, config: ChaosConfig) -> None:
        self.folder = config.folder.absolute() / f"truth-{numbers_sha256(config)[:12]}"
        self._config = run_config(config, self.folder)

    @property
    def commits(self) -> dict[int, dict[str, str]]:
        path = self.folder / "reference.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = [msgspec.json.decode(line, type=ReferenceCommit) for line in lines if line.endswith(b"}")]
        return {commit.step: commit.files for commit in found}

    @property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and norm of the gradient."""
        events = read_events(events_path(self.folder)) if events_path(self.folder).exists() else []
        return {event.step: (event.loss, event.grad_norm) for event in events if isinstance(event, Step)}

    def compute(self, last: int, say: Callable[[str], None]) -> None:
        """What is missing up to this step, in a process of its own: the number of threads is part of the numbers."""
        if max(self.commits, default=0) >= last:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "run.toml"
        file.write_text(dump_toml(self._config))
        program = Program(self.folder / "printed.out", "benchmarks.chaos.reference_run", [file, last])
        began, first = time.monotonic(), max(self.commits, default=0)
        moved = said = began
        done = first
        try:
            while program.running:
                now, commits = time.monotonic(), max(self.commits, default=0)
                if commits > done:
                    done, moved = commits, now
                if now - moved > _QUIET_SECONDS:
                    raise UserError(f"the undisturbed run does not move: {program.tail}")
                if now - said > _PROGRESS_SECONDS and done > first:
                    said, left = now, (last - done) * (now - began) / (done - first)
                    say(f"undisturbed run: step {done} of {last}; about {left / 60:.0f} min left")
                time.sleep(_LOOK_SECONDS)
        finally:
            program.kill()
        if max(self.commits, default=0) < last:
            raise UserError(f"the undisturbed run ended early: {program.tail}")


class _Recording(RunEnvironment):
    """Writes down what is saved, and ends the run at a step."""

    def __init__(self, path: Path, last: int) -> None:
        self._path, self._last, self._step = path, last, 0

    def on_event(self, event: AnyEvent) -> None:
        self._step = max(self._step, event.step)
        if isinstance(event, Saved):
            manifest = Checkpoint.open(Path(event.path), layers=()).manifest
            files = {name: entry.sha256 for name, entry in manifest.files.items()}
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(ReferenceCommit(event.step, files)) + b"\n")

    def asked_to_stop(self) -> bool:
        """Asked in the middle of the step that follows."""
        return self._step >= self._last


def main() -> None:
    file, last = Path(sys.argv[1]), int(sys.argv[2])
    Trainer(load_toml(file, RunConfig), run_environment=_Recording(file.with_name("reference.jsonl"), last)).train()


if __name__ == "__main__":
    main()
