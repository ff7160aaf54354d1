"""What `python -m benchmarks.links` asks its processes and what they answer: one line of JSON in each direction."""

import msgspec

from benchmarks.links.workload import Run


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Build these runs, keep those that are there already, let go of all others."""

    runs: list[Run]


class TimeSteps(msgspec.Struct, frozen=True, tag="time"):
    """Steps of one of the prepared runs."""

    run: int
    steps: int


class ShowOperators(msgspec.Struct, frozen=True, tag="operators"):
    """One more step of a prepared run under torch's profiler."""

    run: int
    rows: int


class ReadMemory(msgspec.Struct, frozen=True, tag="memory"):
    """What this process holds now, and the most it ever held."""


Command = Prepare | TimeSteps | ShowOperators | ReadMemory


class Timing(msgspec.Struct, frozen=True, tag="timing"):
    seconds: list[float]
    """Of each step in this process."""
    busy: list[float]
    """The share of each step in which it did not wait for a message; nothing for the bare engine."""
    loss: float | None


class Operator(msgspec.Struct, frozen=True):
    name: str
    milliseconds: float
    """By itself, without what it calls."""
    calls: int


class Operators(msgspec.Struct, frozen=True, tag="operator table"):
    step_milliseconds: float
    """Of the profiled step, which is slower than others."""
    operators: list[Operator]
    """The costliest first, then all others together."""


class MemoryUse(msgspec.Struct, frozen=True, tag="memory use"):
    held_nbytes: int
    peak_nbytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    pass


Answer = Timing | Operators | MemoryUse | Ready
