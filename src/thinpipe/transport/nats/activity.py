"""Training activity reported in every heartbeat: progress of a peer, and for which peer it waits, if any.

The training thread records its actions and waits; the connection thread sends them to the hub. So the hub can tell a
process that hangs (its heartbeats still arrive) from one that waits for another.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from thinpipe.core.bounds import Count, GenerationNumber, Name, Seconds, Word

HUB = "hub"
"""Name that stands for the hub in `waits_for`."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """Heartbeat message of a peer to the hub."""

    generation: GenerationNumber = 0
    """Number of the generation (set of peers that compute together) to which the peer belongs; 0: none."""
    n_actions: Count = 0
    """Number of actions of the training thread in this generation: sends, starts and ends of waits and of steps."""
    idle_s: Seconds = 0.0
    """Seconds since the last action."""
    waits_for: Name = ""
    """Name of the peer (or `HUB`) that the training thread waits for; empty: it computes."""
    steps: Count = 0
    """Number of steps ended in this generation, including those that ended with an exception."""
    in_step: bool = False
    """True within a step; False while loading, saving, validating or updating the basis."""
    incarnation: Word = ""
    """Incarnation id, a new one at every start of the peer's program. Heartbeats of a superseded incarnation are
    ignored."""


class ActivityTracker:
    """Activity of the training thread of one process, which is the thread that called `begin`.

    Waits and actions of other threads are ignored. `step` is for the training thread alone. Thread-safe.
    """

    def __init__(self, incarnation: str = "") -> None:
        self._incarnation, self._lock = incarnation, threading.Lock()
        self._thread = 0
        self._generation = self._n_actions = self._steps = 0
        self._in_step = False
        self._last_action_at = time.monotonic()
        self._wait: tuple[str, Callable[[], bool]] | None = None

    def begin(self, generation: int) -> None:
        """Starts a generation; the calling thread becomes the training thread."""
        with self._lock:
            self._thread, self._generation = threading.get_ident(), generation
            self._n_actions = self._steps = 0
            self._last_action_at, self._wait, self._in_step = time.monotonic(), None, False

    def end(self) -> None:
        """Ends the generation: from now on heartbeats report that nothing is computed."""
        with self._lock:
            self._thread = self._generation = 0

    def record_action(self) -> None:
        """Records an action, if called in the training thread."""
        if threading.get_ident() == self._thread:
            with self._lock:
                self._record(None)

    @contextmanager
    def waiting(self, whom: str, arrived: Callable[[], bool]) -> Iterator[None]:
        """Context in which the training thread waits for the peer `whom`.

        `arrived` is polled by heartbeats: once it is True the wait counts as over, so that a thread that hangs inside
        this context afterwards is detected as stalled.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        with self._lock:
            self._record((whom, arrived))
        try:
            yield
        finally:
            with self._lock:
                self._record(None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one training step. Within it the hub applies the stall deadline measured for this peer, outside of
        it the start-up deadline (swarm/hub/stalls.py)."""
        self._set_in_step(True)
        try:
            yield
        finally:
            self._set_in_step(False)

    def heartbeat(self) -> Heartbeat:
        """The current heartbeat message; called in the connection thread."""
        with self._lock:
            if not self._generation:
                return Heartbeat(incarnation=self._incarnation)
            if self._wait is not None and self._wait[1]():
                self._record(None)
            return Heartbeat(
                generation=self._generation,
                n_actions=self._n_actions,
                idle_s=time.monotonic() - self._last_action_at,
                waits_for="" if self._wait is None else self._wait[0],
                steps=self._steps,
                in_step=self._in_step,
                incarnation=self._incarnation,
            )

    def _set_in_step(self, in_step: bool) -> None:
        with self._lock:
            self._steps += self._in_step and not in_step
            self._in_step = in_step
            self._record(None)

    def _record(self, wait: tuple[str, Callable[[], bool]] | None) -> None:
        self._n_actions += 1
        self._last_action_at, self._wait = time.monotonic(), wait
