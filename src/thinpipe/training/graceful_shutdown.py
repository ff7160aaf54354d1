"""Graceful shutdown on SIGTERM or SIGINT. The first signal only sets a flag, which the trainer and the hub poll: the
trainer stops after the current step, the hub asks its peers to save and stop. The second signal goes to the previous
handler, which normally ends the process at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Context manager whose `requested` becomes True on the first signal. Does nothing outside the main thread, which
    alone can handle signals."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS if in_main_thread() else ():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()
