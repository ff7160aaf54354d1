"""Makes this process send what it should not: for chaos tests, which then see whether the others notice.

`python -m benchmarks.chaos.poison join ...` is `thinpipe join ...`, except that after SIGUSR1 the next message of a
training step has bad numbers in it. Settings are in the environment: THINPIPE_POISON_LOG, a file that gets a line of
JSON for each; THINPIPE_POISON_VALUE, "nan" if not said; THINPIPE_POISON_TIMES, how often the same message of the same
step is bad when the step is tried again.
"""

import os
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

LOG, VALUE, TIMES = "THINPIPE_POISON_LOG", "THINPIPE_POISON_VALUE", "THINPIPE_POISON_TIMES"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which message; steps count from 1, as in events."""

    step: int
    boundary: int
    forward: bool
    microbatch: int


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log."""

    time_s: float
    place: Place


Choice = Callable[[Place], float | None]
"""What to put into a message; None leaves it alone."""


class PoisonOnSignal:
    """The next message after a signal, and the same one again while there are times left."""

    def __init__(self, value: float, times: int, log: Path) -> None:
        self.value, self.times, self.log = value, times, log
        self._asked, self._place, self._left = False, None, 0

    _place: Place | None

    def ask(self, *_signal: Any) -> None:
        self._asked = True

    def __call__(self, place: Place) -> float | None:
        if self._asked:
            self._asked, self._place, self._left = False, place, self.times
        if place != self._place or not self._left:
            return None
        self._left -= 1
        line = msgspec.json.encode(Injection(time_s=time.time(), place=place)) + b"\n"
        with self.log.open("ab", buffering=0) as file:
            file.write(line)
        return self.value


def poison_when_asked() -> None:
    """From now on SIGUSR1 poisons a message of this process."""
    choose = PoisonOnSignal(float(os.environ.get(VALUE, "nan")), int(os.environ.get(TIMES, "1")), Path(os.environ[LOG]))
    signal.signal(signal.SIGUSR1, choose.ask)
    poison(choose)


def poison(choose: Choice) -> Callable[[], None]:
    """Changes what boundary methods of this process encode in training. Returns what undoes it."""
    from thinpipe.boundary.contract import BoundaryMethod
    from thinpipe.boundary.reused_mask import ReusedMaskMethod

    undo = [
        _wrap(BoundaryMethod, "encode_state", choose, forward=True),
        _wrap(BoundaryMethod, "encode_gradient", choose, forward=False),
        _wrap(ReusedMaskMethod, "encode_gradient", choose, forward=False),
    ]

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


def _wrap(owner: type, name: str, choose: Choice, *, forward: bool) -> Callable[[], None]:
    honest = owner.__dict__[name]

    def encode(self: Any, values: Any, *more: Any) -> Any:
        message_id = more[-1]
        if message_id.training:
            place = Place(
                step=message_id.step + 1,
                boundary=message_id.boundary,
                forward=forward,
                microbatch=message_id.microbatch,
            )
            bad = choose(place)
            if bad is not None:
                values = values.clone()
                values[0] = bad  # all of a sample: whatever a method leaves out, some of it is sent
        return honest(self, values, *more)

    setattr(owner, name, encode)
    return lambda: setattr(owner, name, honest)


def read_injections(path: Path) -> list[Injection]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Injection) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    poison_when_asked()
    runpy.run_module("thinpipe", run_name="__main__", alter_sys=True)
