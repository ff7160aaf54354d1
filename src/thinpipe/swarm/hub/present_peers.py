"""The present peers of a run: which process of each is the newest, and what was measured of them.

Pure state machine without I/O. Who computes is decided by `membership`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from thinpipe.swarm.hub.incarnations import Incarnations
from thinpipe.swarm.protocol.machine_report import MachineReport
from thinpipe.swarm.protocol.messages import Measure, NextRequest

Arrival = Literal["superseded", "known", "new"]
"""What a request shows of the process that sent it: a newer one has been started, it is the present one, or it was not
seen before."""


@dataclass
class PresentPeer:
    """State of a peer that is present."""

    incarnation: str
    """Incarnation id of the peer process."""
    number: int
    """Incarnation number: how many processes of this peer the hub has seen, this one included."""
    report: MachineReport | None
    """Measured speed and memory of the machine; None: not measured yet."""
    left: int = 0
    """Newest generation that the peer has left, or did not take part in: it can only be assigned to a newer one."""
    concurrent: tuple[float, float] | None = None
    """Uplink and downlink rates in bits per second, measured while all peers measured at once."""
    leaving: bool = False
    """True: the peer's user has asked it to leave, which it does after its generation has saved."""
    measuring_concurrently: bool = False
    """True from the start of a concurrent measurement until this peer has reported its rates."""


@dataclass
class PresentPeers:
    """Present peers, by name in order of arrival."""

    hub_bps: tuple[float, float] | None = None
    """Uplink and downlink rates of the hub in bits per second, from the settings or from a concurrent measurement of
    all peers. Once known they do not change."""
    _peers: dict[str, PresentPeer] = field(default_factory=dict)
    _incarnations: Incarnations = field(default_factory=Incarnations)
    _measuring: str | None = None
    """Name of the peer that measures its machine now; only one peer does so at a time."""

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def __getitem__(self, name: str) -> PresentPeer:
        return self._peers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def incarnation_of(self, name: str) -> str | None:
        """Incarnation id of the peer's current process; None: the peer is absent."""
        return self._peers[name].incarnation if name in self._peers else None

    def is_superseded(self, name: str, incarnation: str) -> bool:
        """True if a newer process of this peer has been started."""
        return self._incarnations.is_superseded(name, incarnation)

    def is_current_incarnation(self, name: str, incarnation: str) -> bool:
        """True if the peer is present with this incarnation id."""
        return name in self._peers and self._peers[name].incarnation == incarnation

    def arrival(self, name: str, request: NextRequest) -> Arrival:
        if self.is_superseded(name, request.incarnation):
            return "superseded"
        return "known" if self.is_current_incarnation(name, request.incarnation) else "new"

    def arrive(self, name: str, request: NextRequest) -> None:
        """A process that was not seen before takes part from now on."""
        number = self._incarnations.arrive(name, request.incarnation)
        self._peers[name] = PresentPeer(request.incarnation, number, request.report)

    def on_report(self, name: str, request: NextRequest) -> None:
        """What a present peer says of its machine."""
        peer = self._peers[name]
        peer.report = request.report or peer.report  # a delayed request may predate the measurement
        if self._measuring == name and peer.report is not None:
            self._measuring = None
        if request.concurrent_bps is not None and peer.measuring_concurrently:
            peer.concurrent, peer.measuring_concurrently = request.concurrent_bps, False
            self._update_hub_rates()

    def drop(self, name: str) -> None:
        """The peer was lost, was kicked or has left."""
        self._peers.pop(name, None)
        self._update_hub_rates()
        if self._measuring == name:
            self._measuring = None

    # Measurements

    @property
    def unmeasured(self) -> list[str]:
        return [name for name, peer in self._peers.items() if peer.report is None]

    @property
    def hub_rates(self) -> tuple[float, float]:
        """Uplink and downlink rates of the hub in bits per second; infinite while unknown."""
        return self.hub_bps or (float("inf"), float("inf"))

    def measure(self, name: str) -> Measure | None:
        """What a peer without a report measures now, or one whose part of a concurrent measurement is missing.

        Peers measure one after the other, also while a generation runs, so that a standby is ready when it is needed.
        """
        if self._peers[name].measuring_concurrently:  # even if peers arrived since: the measurement waits for this one
            return Measure(concurrent=True)
        if self._peers[name].report is not None:
            return None
        if self._measuring is None and not self._measuring_concurrently:
            self._measuring = name
        return Measure(concurrent=False) if self._measuring == name else None

    def measure_concurrently(self, name: str) -> Measure | None:
        """Starts a measurement by all measured peers at once, unless one is running. Returns this peer's part."""
        if not self._measuring_concurrently:
            for other in self._peers.values():
                other.concurrent, other.measuring_concurrently = None, other.report is not None
        return Measure(concurrent=True) if self._peers[name].measuring_concurrently else None

    @property
    def _measuring_concurrently(self) -> bool:
        return any(peer.measuring_concurrently for peer in self._peers.values())

    def _update_hub_rates(self) -> None:
        """Derives the hub's rates once every peer of a concurrent measurement has reported or left. The hub's uplink is
        the sum of the peers' downlink rates, and vice versa."""
        measured = [peer.concurrent for peer in self._peers.values() if peer.concurrent is not None]
        if self.hub_bps is None and len(measured) > 1 and not self._measuring_concurrently:
            self.hub_bps = sum(down for _, down in measured), sum(up for up, _ in measured)
