"""Losses of commits, computed by a process of the hub's machine with low priority and one thread.

`CommitLosses` starts `python -m thinpipe.swarm.hub.commit_losses CHECKPOINT PLACE` from a thread, so that the hub's
event loop neither reads, writes nor waits. The process works on links to the commit's files, because the hub may remove
the commit meanwhile; where links cannot be made, on the commit itself. It ends when the hub has ended.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from thinpipe.checkpoint import Checkpoint
from thinpipe.training.weight_sketch import Sketch

_LOG = logging.getLogger(__name__)
_NICE = 10
_MAX_SECONDS = 6 * 3600.0
"""A process that takes longer is ended: something is wrong with it, or the machine is too slow for this model."""
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCommit:
    """Losses that follow from a commit (`training.recomputed_loss`)."""

    step: int
    """Step of the commit."""
    next_step: float
    """Loss of the step after it."""
    own_batch: float
    """Loss of the hub's own batch."""
    sketches: Mapping[str, Sketch] = field(default_factory=dict)
    """Of each layer's weights; the hub's place is their seed, so that nobody else knows it."""


class CommitLosses:
    """Computes the losses of one commit at a time. `place`: where in the training text the hub's own batch begins."""

    def __init__(self, folder: Path, *, place: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._place, self._clock = folder, place, clock
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._found: MeasuredCommit | None = None
        self.problem = ""
        """Why the last run has failed, in words; empty if it has not."""
        self._closed = threading.Event()
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """True from `start` until `poll` has returned a result."""
        return self._thread is not None

    def start(self, checkpoint: Checkpoint) -> None:
        self._found, self.problem, self._began = None, "", self._clock()
        self._thread = threading.Thread(target=self._run, args=(checkpoint,), name="commit losses", daemon=True)
        self._thread.start()

    def poll(self) -> tuple[MeasuredCommit | None, float] | None:
        """What a run that has ended has found, None if it has failed, and the seconds that it took. None: no run has
        ended since the last call."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        return self._found, self._clock() - self._began

    def close(self) -> None:
        self._closed.set()
        if self._process is not None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, checkpoint: Checkpoint) -> None:
        step, links = checkpoint.manifest.step, self._folder / checkpoint.path.name
        try:
            self._found = self._measure(step, _linked(checkpoint.path, links))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if not self._closed.is_set():
                self.problem = next((line for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
                _LOG.warning("the loss of step %d could not be recomputed: %s", step + 1, error)
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _measure(self, step: int, path: Path) -> MeasuredCommit:
        """Raises OSError, SubprocessError or ValueError."""
        command = [sys.executable, "-m", __name__, str(path), str(self._place)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
        ) as process:
            self._process = process
            if self._closed.is_set():
                process.kill()
            try:
                output, errors = process.communicate(timeout=_MAX_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                self._process = None
        if process.returncode:
            raise ValueError(errors[-2000:] or f"exit code {process.returncode}")
        return MeasuredCommit(step=step, **json.loads(output))


def _linked(commit: Path, links: Path) -> Path:
    """A folder with links to the commit's files; the commit itself if links cannot be made."""
    try:
        shutil.copytree(commit, links, copy_function=os.link, dirs_exist_ok=True)
    except OSError:  # a full disk, or a file system without links
        return commit
    return links


def _end_with(parent: int) -> None:
    """Ends this process if its parent has ended: a hub that was killed cannot end it."""
    if os.getppid() != parent:
        sys.exit("the hub has ended")


def main(path: Path, place: int) -> None:
    """Prints the losses that follow from this checkpoint as JSON."""
    parent = os.getppid()
    psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS if os.name == "nt" else _NICE)
    import tomllib

    from thinpipe.config.run import RunConfig
    from thinpipe.config.toml import from_table
    from thinpipe.data import Cursor
    from thinpipe.training.data_loading import LocalTokens
    from thinpipe.training.recomputed_loss import recompute_losses

    checkpoint = Checkpoint.open(path)
    source = LocalTokens(from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(path)))
    own_batch = source.batch(Cursor(samples_seen=place))
    losses = recompute_losses(
        checkpoint, source, own_batch, sketch_seed=place, on_segment=lambda _index: _end_with(parent)
    )
    print(json.dumps(asdict(losses)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
