"""Who is alive: peers send a beat every half second, and one that has sent none for too long is lost to everybody."""

from collections.abc import Iterable

LOST_AFTER_SECONDS = 10.0


class Hearts:
    """Pure: told of beats and of the time."""

    def __init__(self, lost_after: float = LOST_AFTER_SECONDS) -> None:
        self._lost_after = lost_after
        self._last: dict[str, float] = {}

    def beat(self, name: str, now: float) -> None:
        self._last[name] = now

    def excuse(self, seconds: float) -> None:
        """We did not listen for so long: nobody is to blame for it."""
        self._last = {name: last + seconds for name, last in self._last.items()}

    def newly_lost(self, now: float) -> Iterable[str]:
        """Those whose last beat is too long ago; each is told once, until it beats again."""
        lost = [name for name, last in self._last.items() if now - last > self._lost_after]
        for name in lost:
            del self._last[name]
        return lost
