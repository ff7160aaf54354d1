"""Measured points: what each one is, and the file to which every finished one is added at once.

A point is found again by all that defines it, so a restart measures only what is missing and a changed setting is
another point.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.links.commands import Operators
from benchmarks.links.workload import Run


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be measured: some runs, in the same processes."""

    part: str
    name: str
    """For people."""
    runs: tuple[Run, ...]
    pairs: int = 0
    """Of two runs, in turn; 0: `steps` of each instead."""
    steps: tuple[int, ...] = ()
    operators: bool = False
    """Also profile one step of the last run."""
    memory: bool = False
    """The peak of the last run, in processes of their own; times mean nothing then."""
    threads: int = 1

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    @property
    def counts(self) -> tuple[int, ...]:
        """Timed steps of each run."""
        return (self.pairs, self.pairs) if self.pairs else self.steps


class RunTimes(msgspec.Struct, frozen=True):
    """Of one run of a task."""

    seconds: list[float]
    """Of each timed step."""
    busy: list[list[float]] = []
    """By process: the share of each step in which it did not wait for a message."""
    loss: float | None = None


class ProcessMemory(msgspec.Struct, frozen=True):
    """Of one process of a run. Resident sets, less what it held before the run was built."""

    kept_nbytes: int
    """Between two steps: weights, gradients, optimiser."""
    peak_nbytes: int
    """Within a step."""

    @property
    def passing_nbytes(self) -> int:
        """Activations, messages and whatever else comes and goes in a step."""
        return self.peak_nbytes - self.kept_nbytes


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    key: str
    task: Task
    times: list[RunTimes]
    operators: list[Operators] = []
    """By process."""
    memory: list[ProcessMemory] = []
    """By process."""


class PointsFile:
    """One line of JSON per point. A line cut short by a crash is ignored, and its point measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[str, Point] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in filter(None, lines):
            try:
                point = msgspec.json.decode(line, type=Point)
            except msgspec.DecodeError:
                continue
            self.points[point.key] = point

    def add(self, point: Point) -> None:
        self.points[point.key] = point
        with self.path.open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(point) + b"\n")  # the last line may have been cut short
            file.flush()
            os.fsync(file.fileno())
