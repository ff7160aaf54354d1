"""Settings of the link emulation between pipeline processes. Imports no torch."""

import math
from dataclasses import dataclass

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_duration, parse_rate


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Emulated internet links: limits the rate and adds latency between the processes of one machine."""

    up: str | None = None
    """Uplink rate of each process, shared by everything the process sends, for example 80mbps. None: unlimited."""
    down: str | None = None
    """Downlink rate of each process, shared by everything the process receives, for example 80mbps. None: unlimited."""
    latency: str = "0ms"
    """One-way latency added to every message, for example 20ms for a round-trip time of 40ms."""
    jitter: str = "0ms"
    """Maximum additional random latency of a message. Messages are not reordered."""

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
        """Uplink rate in bits per second; infinite if unlimited."""
        return math.inf if self.up is None else parse_rate(self.up)

    @property
    def down_bps(self) -> float:
        """Downlink rate in bits per second; infinite if unlimited."""
        return math.inf if self.down is None else parse_rate(self.down)

    @property
    def latency_s(self) -> float:
        return parse_duration(self.latency)

    @property
    def jitter_s(self) -> float:
        return parse_duration(self.jitter)

    @property
    def is_shaped(self) -> bool:
        """Whether links are emulated. False: messages go to the process group directly."""
        return math.isfinite(min(self.up_bps, self.down_bps)) or max(self.latency_s, self.jitter_s) > 0
