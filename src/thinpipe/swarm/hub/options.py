"""Options of a hub that are independent of the model: name of the run, URL of the broker, number of peers,
link rates of the hub and deadlines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinpipe.swarm.hub.liveness import HEARTBEAT_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS
from thinpipe.swarm.hub.services.budgets import BUDGETS, Budget
from thinpipe.swarm.protocol.names import check_name


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options of the hub that are independent of the model."""

    run: str
    """Name of the run."""
    public_url: str
    """URL of the broker, as written in invites."""
    peers: int
    """Number of peers for which the first generation waits."""
    replicas: int = 1
    """Number of pipelines that have generations at the same time. The commits of a run and what peers are compared with
    are still those of one, so no setting of a hub raises it."""
    invite_seconds: float = 7 * 86400.0
    """Seconds for which a new invite can be used."""
    hub_bps: tuple[float, float] | None = None
    """Uplink and downlink rates of the hub in bits per second; None: the sum of the rates that all peers measure
    at the same time."""
    keep_ends: tuple[str, ...] = ()
    """Names that are kept for machines of the hub's owner; see `HubSettings.keep_ends`."""
    exact: bool = False
    """True: a segment is computed by devices of the class that computed it first, or by none."""
    patience_seconds: float = 60.0
    """Seconds that a later generation waits for as many peers as computed before, and that a repair (fetching lost
    files of the newest checkpoint from peers) waits for absent peers."""
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS
    """Seconds without a heartbeat after which a peer is declared lost."""
    stall_factor: float = 4.0
    """A peer is declared stalled when it neither acts nor waits for longer than this multiple of its longest time
    between two actions (sends, waits, ends of steps) within earlier steps."""
    stall_floor_seconds: float = 10.0
    """Minimum stall deadline, in seconds."""
    startup_seconds: float = 300.0
    """Stall deadline, in seconds, for phases without a measured duration: start-up, first steps, loading, saving,
    validation."""
    request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    """Seconds after which a peer that was answered with `Standby`, `Measure` or `RestoreFiles`, and has not sent
    another request, is declared lost."""
    budgets: Mapping[str, Budget] = field(default_factory=lambda: BUDGETS)
    """What one peer may ask of each service."""

    def __post_init__(self) -> None:
        for name in self.keep_ends:
            check_name(name)
