"""The picture of a run in the terminal of the program that trains or hosts it, with what it prints above."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from thinpipe.core.events import AnyEvent
from thinpipe.live.follow import Following
from thinpipe.live.terminal import render


class Table:
    """Is told every event; draws twice a second, in a thread of its own."""

    def __init__(self, console: Console, run: Path) -> None:
        following = Following(run)
        following.look()  # what happened before this start
        self._story, self._lock = following.story, threading.Lock()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)

    def _render(self) -> RenderableType:
        with self._lock:
            return render(self._story.picture(), time.time(), width=self._live.console.width)

    def show(self, event: AnyEvent) -> None:
        with self._lock:
            self._story.tell(event)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
