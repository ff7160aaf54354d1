"""Settings of the line of a process. No torch here."""

import math
from dataclasses import dataclass

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_duration, parse_rate


@dataclass(frozen=True, kw_only=True)
class LinkSection:
    """Give every process a slower line than it has, to see on one machine what the internet will do."""

    up: str | None = None
    """All that a process sends shares this rate, for example 80mbps. None: as fast as the machine allows."""
    down: str | None = None
    """All that a process receives shares this rate, for example 80mbps. None: as fast as the machine allows."""
    latency: str = "0ms"
    """One way, added to everything a process sends, for example 20ms for a round trip of 40ms."""
    jitter: str = "0ms"
    """Each message is late by up to this much more, at random; messages do not overtake each other."""

    def __post_init__(self) -> None:
        for name, read in (
            ("up", parse_rate),
            ("down", parse_rate),
            ("latency", parse_duration),
            ("jitter", parse_duration),
        ):
            value = getattr(self, name)
            try:
                if value is not None:
                    read(value)
            except UserError as error:
                raise UserError(f"link.{name}: {error}") from None

    @property
    def up_bps(self) -> float:
        """Bits per second; infinite when there is no limit."""
        return math.inf if self.up is None else parse_rate(self.up)

    @property
    def down_bps(self) -> float:
        """Bits per second; infinite when there is no limit."""
        return math.inf if self.down is None else parse_rate(self.down)

    @property
    def latency_s(self) -> float:
        return parse_duration(self.latency)

    @property
    def jitter_s(self) -> float:
        return parse_duration(self.jitter)

    @property
    def is_shaped(self) -> bool:
        """False: the line is as it is, and nothing stands between the processes and their group."""
        return math.isfinite(min(self.up_bps, self.down_bps)) or max(self.latency_s, self.jitter_s) > 0
