"""Watches all peers for signs that they are lost: no heartbeat, a stall, a request from which they do not come back."""

from collections.abc import Iterator

from thinpipe.swarm.hub.liveness import Heartbeats, PendingRequests
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.stalls import StallDetector
from thinpipe.transport.nats.activity import Heartbeat


class Watch:
    """Pure: `now` is in seconds of a monotonic clock."""

    def __init__(self, settings: HubOptions, *, replicas: int = 1) -> None:
        self.heartbeats = Heartbeats(settings.heartbeat_timeout_seconds)
        longest: dict[tuple[str, int], float] = {}
        self.stall_detectors = [
            StallDetector(
                factor=settings.stall_factor,
                floor_seconds=settings.stall_floor_seconds,
                startup_seconds=settings.startup_seconds,
                longest=longest,
            )
            for _ in range(replicas)
        ]
        """By replica."""
        self.pending_requests = PendingRequests(settings.request_timeout_seconds)

    def on_heartbeat(self, peer: str, heartbeat: Heartbeat, now: float) -> None:
        self.heartbeats.on_heartbeat(peer, now)
        for detector in self.stall_detectors:
            detector.on_heartbeat(peer, heartbeat)

    def on_request(self, peer: str, now: float) -> None:
        """The peer has asked what to do next."""
        self.heartbeats.on_heartbeat(peer, now)
        self.pending_requests.discard(peer)

    def drop_peer(self, name: str) -> None:
        for detector in self.stall_detectors:
            detector.drop_peer(name)
        self.pending_requests.discard(name)

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all deadlines by the seconds in which the hub did not process messages (suspended or busy)."""
        self.heartbeats.extend_deadlines(seconds)
        for detector in self.stall_detectors:
            detector.extend_deadlines(seconds)
        self.pending_requests.extend_deadlines(seconds)

    def lost(self, now: float) -> Iterator[tuple[str, str, str]]:
        """Peers past a deadline: name, cause (see `core.hub_events.PeerLeft`), and how that was noticed, in words."""
        for name, seconds in self.heartbeats.newly_timed_out(now):
            yield name, "no_heartbeat", f"no heartbeat for {seconds:.0f} s"
        for detector in self.stall_detectors:
            for stalled in detector.stalled(now):
                yield stalled.name, "stalled", stalled.message
        for name, message in self.pending_requests.overdue(now):
            yield name, "unresponsive", message
