"""The log of a chaos run, one JSON object a line: what was done, what was seen, by the clock. All results come from it.

A line that a crash cut short is passed over. `clock_s` counts the seconds of the run without its breaks.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from thinpipe.core.events import AnyEvent


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    time_s: float
    """Since 1970."""
    clock_s: float


class Begun(Record, frozen=True, kw_only=True, tag="begun"):
    """The first step, also after a break."""

    command: str
    seed: int


class Struck(Record, frozen=True, kw_only=True, tag="fault"):
    """Something was done to somebody."""

    kind: str
    victim: str
    seconds: float
    skipped: str = ""
    """Why it was not done."""
    detail: str = ""


class Healed(Record, frozen=True, kw_only=True, tag="healed"):
    """A fault was undone: a program started again or continued, a link repaired, a disk emptied."""

    kind: str
    victim: str
    detail: str = ""


class Committed(Record, frozen=True, kw_only=True, tag="commit"):
    step: int
    files: dict[str, str]
    """sha256 of each."""


class Hashed(Record, frozen=True, kw_only=True, tag="disk"):
    """A commit as it lies on the hub's disk when all is over."""

    step: int
    files: dict[str, str]
    """sha256 of each, computed from its bytes."""


class Happened(Record, frozen=True, kw_only=True, tag="event"):
    """An event in the log of the hub's run."""

    event: AnyEvent


class Sampled(Record, frozen=True, kw_only=True, tag="use"):
    """Memory and file handles of a process."""

    who: str
    pid: int
    rss_nbytes: int
    handles: int


class Exited(Record, frozen=True, kw_only=True, tag="exit"):
    """A program that nobody has ended."""

    who: str
    code: int
    tail: str


class Named(Record, frozen=True, kw_only=True, tag="named"):
    """A line of the hub's own log, or one that it printed, that names the hostile member."""

    text: str


class Raised(Record, frozen=True, kw_only=True, tag="raised"):
    """The hub printed a traceback: something failed that nobody had thought of."""

    text: str
    """Its last line."""


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """The last commit has come, or `problem`."""

    problem: str = ""


AnyRecord = Begun | Struck | Healed | Committed | Hashed | Happened | Sampled | Exited | Named | Raised | Ended
_DECODER = msgspec.json.Decoder(AnyRecord)


class ChaosLog:
    """Appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        if self._file.tell():
            self._file.write(b"\n")  # the last line may have been cut short

    def write(self, record: AnyRecord) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_log(path: Path) -> Iterator[AnyRecord]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                try:
                    yield _DECODER.decode(line)
                except msgspec.ValidationError:
                    raise
                except msgspec.DecodeError:
                    continue
