"""Graceful shutdown on SIGTERM or SIGINT. The first signal only sets a flag, which the trainer and the hub poll: the
trainer stops after the current step, the hub asks its peers to save and stop. The second signal goes to the previous
handler, which normally ends the process at once. What each of them does is printed."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

_LOG = logging.getLogger(__name__)

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
if sys.platform == "win32":
    SIGNALS += (signal.SIGBREAK,)  # Ctrl+Break, and a console window that is closed


def install_handler(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handles SIGTERM and SIGINT with `handler`; returns the previous handlers, for `restore_handlers`.

    Handles nothing outside the main thread, which alone can, and no signal whose handler was not installed from Python:
    Python could not restore it.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    current = {number: signal.getsignal(number) for number in SIGNALS if in_main_thread}
    previous = {number: known for number, known in current.items() if known is not None}
    for number in previous:
        signal.signal(number, handler)
    return previous


def restore_handlers(previous: Mapping[signal.Signals, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)


class StopRequest:
    """Context manager that keeps the first signal. Does nothing where `install_handler` handles nothing.

    `on_first` says what the first signal does, in a thread of its own, so that it may wait for whoever prints at that
    moment. `lost` returns what a second one costs, which is written to stderr before the process ends.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None, lost: Callable[[], str] = lambda: "") -> None:
        self._on_first, self._lost = on_first, lost
        self.signal: signal.Signals | None = None
        """The first signal; None: no signal has arrived."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Self:
        self._previous = install_handler(self._on_signal)
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            threading.Thread(target=self._on_first, name="says that it stops", daemon=True).start()
            return
        restore_handlers(self._previous)
        if text := self._lost():
            with suppress(OSError):  # not through a stream that this signal may have interrupted
                os.write(2, f"\nthinpipe: {text}\n".encode())
        signal.raise_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_handlers(self._previous)


def follow_parent(*, at_end: signal.Signals = signal.SIGTERM, piped_output: bool = False) -> None:
    """Starts a thread that sends this process the signals whose numbers its parent writes to standard input, one byte
    each, and `at_end` when the parent has ended (end of file), so that the run saves and stops.

    `piped_output`: the parent alone reads what this process prints; after its end nothing is printed any more.
    """

    def follow() -> None:
        while number := os.read(0, 1):  # not sys.stdin: an interpreter cannot end while a thread holds the lock of that
            _signal_this_process(number[0])
        if piped_output:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        _signal_this_process(at_end)  # before the warning: nobody may read stderr any more
        _LOG.warning("the program that started this process has ended: saving a checkpoint and stopping")

    threading.Thread(target=follow, name="follows the parent", daemon=True).start()


def _signal_this_process(number: int) -> None:
    if sys.platform == "win32":
        signal.raise_signal(number)  # os.kill would end the process there
    else:
        os.kill(os.getpid(), number)  # interrupts what the main thread waits for
