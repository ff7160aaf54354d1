"""The processes of `python -m benchmarks.links`: started once, given commands in step, ended together."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from benchmarks.links.commands import (
    Answer,
    Command,
    MemoryUse,
    Operators,
    Prepare,
    ReadMemory,
    Ready,
    ShowOperators,
    TimeSteps,
    Timing,
)
from benchmarks.links.workload import Run
from thinpipe.transport.rendezvous import local_group

WORKER = "benchmarks.links.worker"
ANSWER_SECONDS = 1800.0
END_SECONDS = 15.0

AnswerType = TypeVar("AnswerType", Timing, Operators, MemoryUse, Ready)


class WorkerPool:
    """As many processes as a run has stages. A context manager: at the end of the block they are gone."""

    def __init__(
        self, size: int, *, threads: int = 1, variables: Mapping[str, str] | None = None, worker: str = WORKER
    ) -> None:
        """`worker` is the module that each process runs: another one may give runs other groups."""
        self.size, self._worker = size, worker
        self._runs: list[Run] = []
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the crew
        self._answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
        self._folder = tempfile.TemporaryDirectory()
        group = local_group(size, Path(self._folder.name) / "store-port")
        self._processes = [self._start(environment | of_rank) for of_rank in group]
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", self._worker],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put((rank, line))
        self._answers.put((rank, b""))

    def prepare(self, runs: Sequence[Run]) -> None:
        """These and no others. Those that were not there before take one step that nobody times."""
        known, self._runs = self._runs, list(runs)
        self._ask(Prepare(runs=self._runs), Ready)
        for run in self._runs:
            if run not in known:
                self.time(run, 1)

    def time(self, run: Run, steps: int) -> list[Timing]:
        """Of each process."""
        return self._ask(TimeSteps(run=self._runs.index(run), steps=steps), Timing)

    def operators(self, run: Run, rows: int = 12) -> list[Operators]:
        return self._ask(ShowOperators(run=self._runs.index(run), rows=rows), Operators)

    def memory(self) -> list[MemoryUse]:
        return self._ask(ReadMemory(), MemoryUse)

    def _ask(self, command: Command, kind: type[AnswerType]) -> list[AnswerType]:
        """One answer from each, in the order of their ranks."""
        data = msgspec.json.encode(command) + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it is gone: then its answers have ended, which is seen below
                process.stdin.write(data)
                process.stdin.flush()
        answers: dict[int, AnswerType] = {}
        while len(answers) < self.size:
            rank, line = self._answers.get(timeout=ANSWER_SECONDS)
            if not line:
                raise RuntimeError(f"process {rank} of the measurement ended early:\n{self._last_words()}")
            answer = msgspec.json.decode(line, type=Answer)
            assert isinstance(answer, kind), f"{answer} in answer to {command}"
            answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=0 if kind is not None else END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._errors.close()
        self._folder.cleanup()


def slowest(timings: Sequence[Timing]) -> list[float]:
    """A step is over when it is over everywhere."""
    return [max(seconds) for seconds in zip(*(timing.seconds for timing in timings), strict=True)]
