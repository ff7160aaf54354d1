"""Audit of reported losses: the hub computes some of them again from its own commits.

The step after a commit starts from the commit, so its loss follows from the hub's files and tokens
(`training/recomputed_loss.py`), whoever trained. One process at a time does it, with a low priority and one
thread: `python -m thinpipe.swarm.hub.loss_audit CHECKPOINT`. It works on links to the commit's files, because the hub
may remove the commit meanwhile.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from thinpipe.checkpoint import Checkpoint
from thinpipe.core.events import LossRecomputed, Step

_LOG = logging.getLogger(__name__)
_REMEMBERED_STEPS = 10_000
"""Steps whose reported loss is kept. A commit is complete some steps after its own."""
_NICE = 10


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: "subprocess.Popen[str]"
    folder: Path
    step: int
    """The step whose loss is computed: the one after the commit."""
    began: float


class LossAudit:
    """Recomputes losses of a run, in at most `share` of the time; 0: never. `band`: largest relative difference of a
    loss that devices and kernels explain. `folder` is emptied."""

    def __init__(self, folder: Path, *, share: float, band: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._share, self._band, self._clock = folder, share, band, clock
        self._reported: dict[int, tuple[float, list[str]]] = {}
        """By step: the loss, and the peers that computed and reported it."""
        self._running: _Running | None = None
        self._not_before = 0.0
        shutil.rmtree(folder, ignore_errors=True)

    def on_step(self, event: Step, peers: list[str]) -> None:
        """`peers`: names of the peers that have computed and reported the loss."""
        self._reported.pop(event.step, None)  # a step that was computed again becomes the newest
        self._reported[event.step] = event.loss, peers
        while len(self._reported) > _REMEMBERED_STEPS:
            del self._reported[next(iter(self._reported))]

    def on_commit(self, checkpoint: Checkpoint) -> None:
        """Starts an audit of the step after this commit, if none is running and it is time for one."""
        if not self._share or self._running is not None or self._clock() < self._not_before:
            return
        folder = self._folder / checkpoint.path.name
        try:
            shutil.copytree(checkpoint.path, folder, copy_function=os.link, dirs_exist_ok=True)
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        except OSError as error:
            _LOG.warning("the loss of step %d is not recomputed: %s", checkpoint.manifest.step + 1, error)
            shutil.rmtree(folder, ignore_errors=True)
            return
        self._running = _Running(process=process, folder=folder, step=checkpoint.manifest.step + 1, began=self._clock())

    def poll(self) -> LossRecomputed | None:
        """The result of an audit that has ended since the last call, once the loss of its step is reported."""
        running = self._running
        if running is None or running.process.poll() is None:
            return None
        if running.step not in self._reported and max(self._reported, default=0) <= running.step:
            return None  # the step is still being computed
        self._running, seconds = None, self._clock() - running.began
        self._not_before = self._clock() + seconds * (1 / self._share - 1)
        output, errors = running.process.communicate()
        shutil.rmtree(running.folder, ignore_errors=True)
        if running.process.returncode:
            _LOG.warning("the loss of step %d could not be recomputed: %s", running.step, errors[-2000:])
            return None
        if running.step not in self._reported:
            return None  # the step was skipped
        loss, peers = self._reported[running.step]
        recomputed = float(json.loads(output))
        return LossRecomputed(
            step=running.step, reported=loss, recomputed=recomputed, band=self._band, peers=peers, seconds=seconds
        )

    def close(self) -> None:
        if self._running is not None:
            self._running.process.kill()
            self._running.process.communicate()
            self._running = None
        shutil.rmtree(self._folder, ignore_errors=True)


def main(path: Path) -> None:
    """Prints the loss of the step after this checkpoint."""
    psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS if os.name == "nt" else _NICE)
    import tomllib

    from thinpipe.config.run import RunConfig
    from thinpipe.config.toml import from_table
    from thinpipe.training.data_loading import LocalTokens
    from thinpipe.training.recomputed_loss import recompute_loss

    checkpoint = Checkpoint.open(path)
    config = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(path))
    print(json.dumps(recompute_loss(checkpoint, LocalTokens(config))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
