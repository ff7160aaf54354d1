"""What a peer says with every heartbeat of the work it does: how far it is, and for whom it waits if it waits.

One thread computes. Whoever makes it wait says so here, and the post's thread tells the hub, so that a process that
hangs while its heart beats can be told from one that waits for another.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
HUB = "hub"


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    epoch: _Count = 0
    """0: none, it has nothing to compute."""
    marks: _Count = 0
    """Things done in this epoch: a message sent or received, an answer of the hub, a step."""
    quiet_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """Since the last of them."""
    waits_for: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """A peer, or the hub; empty: it computes."""
    steps: _Count = 0
    """Done in this epoch."""
    stepping: bool = False
    """Not: it loads, saves, validates or changes the basis, whose times are not those of a step."""
    life: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Of the program: the heart of one that another has followed says nothing of that other."""


BEATS = msgspec.msgpack.Decoder(Beat)


class Progress:
    """Of one process. Only the thread that has begun an epoch computes: what others wait for is not looked at."""

    def __init__(self, life: str = "") -> None:
        self._life, self._turn = life, threading.Lock()
        self._thread = 0
        self._epoch = self._marks = self._steps = 0
        self._stepping = False
        self._marked_at = time.monotonic()
        self._wait: tuple[str, Callable[[], bool]] | None = None

    def begin(self, epoch: int) -> None:
        """The thread that calls this computes it."""
        with self._turn:
            self._thread, self._epoch = threading.get_ident(), epoch
            self._marks = self._steps = 0
            self._marked_at, self._wait, self._stepping = time.monotonic(), None, False

    def end(self) -> None:
        with self._turn:
            self._thread = self._epoch = 0

    def mark(self) -> None:
        """Something is done."""
        if threading.get_ident() == self._thread:
            with self._turn:
                self._mark(None)

    @contextmanager
    def waiting(self, whom: str, arrived: Callable[[], bool]) -> Iterator[None]:
        """Until `arrived`: who hangs after that, without having noticed, waits for nobody."""
        if threading.get_ident() != self._thread:
            yield
            return
        with self._turn:
            self._mark((whom, arrived))
        try:
            yield
        finally:
            with self._turn:
                self._mark(None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is done here takes about as long every time."""
        self._set_stepping(True)
        try:
            yield
        finally:
            self._set_stepping(False)

    def beat(self) -> Beat:
        with self._turn:
            if not self._epoch:
                return Beat(life=self._life)
            if self._wait is not None and self._wait[1]():
                self._mark(None)
            return Beat(
                epoch=self._epoch,
                marks=self._marks,
                quiet_s=time.monotonic() - self._marked_at,
                waits_for="" if self._wait is None else self._wait[0],
                steps=self._steps,
                stepping=self._stepping,
                life=self._life,
            )

    def _set_stepping(self, stepping: bool) -> None:
        with self._turn:
            self._steps += self._stepping and not stepping
            self._stepping = stepping
            self._mark(None)

    def _mark(self, wait: tuple[str, Callable[[], bool]] | None) -> None:
        self._marks += 1
        self._marked_at, self._wait = time.monotonic(), wait
