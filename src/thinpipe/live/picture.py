"""What there is to see of a run at one moment. The terminal and the page draw this and nothing else."""

import msgspec


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Segments that follow each other and the process or peer that computes them, in the order of the model."""

    name: str
    segments: list[int]
    busy: float | None = None
    """The share of its time in which it computed, lately; the rest went by in waiting."""
    memory_nbytes: int | None = None
    """The most that it ever held."""
    here: bool = True
    """False: it is gone, and the next epoch has not begun."""
    device: str = ""
    up_bps: float = 0.0
    down_bps: float = 0.0
    latency_s: float = 0.0


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A boundary between two processes, lately."""

    boundary: int
    forward_mbps: float
    back_mbps: float
    nbytes_per_token: float
    """Both directions."""
    waited: float
    """The larger share of a step that one of its ends had nothing to do but wait for the other."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something that people want to know."""

    time_s: float
    step: int
    kind: str
    """The event's tag, or recovered."""
    text: str


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody was gone, and the run went on."""

    step: int
    """The last before it."""
    seconds: float
    """Until the next step was finished."""
    lost_steps: int
    """That were computed again."""
    reason: str


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    state: str
    """waiting, running, recovering, finished, or "stopped: why"."""
    heard_s: float | None
    """When the last event was written, in seconds since 1970."""
    quiet_after_s: float
    """Who has heard nothing for longer may think that something is wrong."""
    step: int
    steps: int
    """0: not known yet."""
    tokens: int
    loss: float | None
    tokens_per_second: float | None
    eta_s: float | None
    """At `heard_s`."""
    parameters: int
    epoch: int
    """0: not a hub's run."""
    compression: float | None
    """How many times fewer bytes cross than those of a dense model in bfloat16."""
    bubble: float | None
    slowest: str
    seats: list[Seat]
    crossings: list[Crossing]
    spares: list[str]
    """Peers that are there and compute nothing."""
    curve: list[tuple[int, float]]
    """Step and loss, thinned."""
    validations: list[tuple[int, float]]
    recoveries: list[Recovery]
    notes: list[Note]
    """The newest last."""
