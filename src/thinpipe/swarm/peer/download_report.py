"""What a person reads while files are downloaded: what and how much, then every ten seconds how far and how long
still."""

import time
from collections.abc import Callable

from thinpipe.core.units import format_bytes, format_duration_ceil
from thinpipe.swarm.peer.file_transfer import OnProgress

_EVERY_SECONDS = 10.0


class DownloadReport:
    """Nothing is printed before the first bytes arrive. `what`: for example "3 files of step 40"; `nbytes`: of all
    files; `clock`: monotonic seconds."""

    def __init__(
        self, what: str, nbytes: int, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._nbytes, self._print, self._clock = what, nbytes, print_line, clock
        self._before_nbytes = 0
        self._begun: tuple[float, int] | None = None
        self._said = 0.0

    def file(self, nbytes: int, *, then: OnProgress | None = None) -> OnProgress:
        """For the next file: to be called with how much of it there is, if it is downloaded at all. `then`: called
        afterwards."""
        before, self._before_nbytes = self._before_nbytes, self._before_nbytes + nbytes

        def progress(stored_nbytes: int, nbytes: int) -> None:
            self._report(before + stored_nbytes)
            if then is not None:
                then(stored_nbytes, nbytes)

        return progress

    def _report(self, there: int) -> None:
        now = self._clock()
        if self._begun is None:
            self._begun, self._said = (now, there), now
            self._print(f"downloading {self._what}, {format_bytes(self._nbytes)}")
            return
        since, first = self._begun
        if now < self._said + _EVERY_SECONDS or not first < there < self._nbytes:
            return
        self._said = now
        left = (self._nbytes - there) * (now - since) / (there - first)
        self._print(
            f"downloading {self._what}: {format_bytes(there)} of {format_bytes(self._nbytes)}, "
            f"{format_duration_ceil(left)} left"
        )
