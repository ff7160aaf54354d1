"""What peers were told to do outside of an epoch, and since when: who hangs there while its heart beats is lost too.

After every answer but work a peer asks again soon. Until then others may wait for it: for their turn to measure, for
what it gives. Pure: told of answers and of the time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from thinpipe.swarm.messages import Answer, Give, Measure, Wait

ERRAND_SECONDS = 300.0
"""Many times what measuring takes; of giving, what may pass between two pieces: reading a part from a slow disk."""
_WORDS: dict[type[Answer], str] = {Measure: "to measure", Give: "to give what the hub has lost", Wait: "to wait"}


@dataclass
class _Errand:
    what: str
    since: float


@dataclass
class Errands:
    seconds: float = ERRAND_SECONDS
    _of: dict[str, _Errand] = field(default_factory=dict)

    def told(self, name: str, answer: Answer, now: float) -> None:
        """What it is to do until it asks again. Who works is watched elsewhere."""
        self.done(name)
        if type(answer) in _WORDS:
            self._of[name] = _Errand(_WORDS[type(answer)], now)

    def goes_on(self, name: str, now: float) -> None:
        """A piece of what it gives has come."""
        if name in self._of:
            self._of[name].since = now

    def done(self, name: str) -> None:
        """It asks again, or is gone."""
        self._of.pop(name, None)

    def excuse(self, seconds: float) -> None:
        """We did not listen for so long."""
        for errand in self._of.values():
            errand.since += seconds

    def late(self, now: float) -> Iterator[tuple[str, str]]:
        """Names, and what to say of each."""
        for name, errand in list(self._of.items()):
            if now - errand.since > self.seconds:
                words = f"its heart beats, but it was told {errand.what} {now - errand.since:.0f} s ago"
                yield name, f"{name} is lost: {words} and has not asked again (deadline {self.seconds:.0f} s)"
