"""Observer of a run: who is called with its events, whether it prints, and how it ended. Imports no torch."""

import signal
from collections.abc import Callable, Sequence

from thinpipe.core.events import AnyEvent, Stopped

Callback = Callable[[AnyEvent], object]
FAILED = ("not_finite", "not_saved")
"""Stop reasons with which the processes of a run end with exit code 1, without an exception."""


class Observer:
    """Passes the events of a run to callbacks. A callback that raises an exception ends the run: no callback is called
    any more, the run saves a checkpoint and stops, and `raise_error` raises the exception. A run in this process stops
    before its next step, a run in several processes after the step in which the request arrives."""

    def __init__(self, callbacks: Sequence[Callback] = (), *, quiet: bool = False) -> None:
        self.quiet = quiet
        """True: nothing is printed on the console."""
        self.stop_reason: str | None = None
        """Reason of the last `Stopped` event; None while the run goes on, or if it failed."""
        self.stop_signal: signal.Signals | None = None
        """Signal that asked the run to stop (Ctrl+C is SIGINT); None: there was none."""
        self._callbacks = callbacks
        self._error: BaseException | None = None

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, Stopped):
            self.stop_reason = event.reason
        try:
            for callback in self._callbacks if self._error is None else ():
                callback(event)
        except Exception as error:  # code of the user: any exception
            self._error = error

    def asked_to_stop(self) -> bool:
        return self._error is not None

    def raise_error(self) -> None:
        """Raises what a callback has raised, if one has."""
        if self._error is not None:
            raise self._error
