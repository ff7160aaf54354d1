"""Graceful shutdown: the first SIGTERM or SIGINT asks the run to stop after the current step, the second one gets the
previous handler, which normally ends the process at once."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context manager whose `requested` becomes True on the first signal. Must be used in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
