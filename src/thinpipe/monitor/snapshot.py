"""Snapshot of a run: all that the terminal view and the web page show."""

import msgspec


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive segments, and the process or peer that computes them."""

    name: str
    segments: list[int]
    busy: float | None = None
    """Share of the time in which the process computed rather than waited, over the last steps; 0 to 1."""
    memory_nbytes: int | None = None
    """Peak memory of the process, in bytes."""
    is_connected: bool = True
    """False: the peer has left, and the next generation has not started."""
    device: str = ""
    up_bps: float = 0.0
    down_bps: float = 0.0
    latency_s: float = 0.0


class BoundaryTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic at a boundary between two processes, averaged over the last steps."""

    boundary: int
    forward_mbps: float
    back_mbps: float
    nbytes_per_token: float
    """Payload bytes per token, both directions."""
    waited: float
    """Share of the time in which a receiver waited for messages at this boundary; that of the direction with more
    waiting."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the event list."""

    time_s: float
    step: int
    kind: str
    """Tag of the event, or "recovered"."""
    text: str


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Interruption after which the run continued."""

    step: int
    """Last step before the interruption."""
    seconds: float
    """Seconds from the end of the generation to the end of the next step."""
    lost_steps: int
    """Number of steps that were computed again."""
    reason: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    state: str
    """One of waiting, running, recovering, finished, and "stopped: REASON"."""
    now: str
    """What happens now, and on whose machines, in words."""
    limit: str
    """What limits the speed, in words; empty if unknown."""
    planned_tokens_per_second: float | None
    """Speed that the hub expects of this generation, from its measurements. None: unknown, as without a hub."""
    last_event_s: float | None
    """Time of the last event, in seconds since 1970. None: no event yet."""
    stale_after_s: float
    """Seconds without an event after which a running run counts as stale."""
    step: int
    steps: int
    """Number of steps of the whole run. 0: not known yet."""
    tokens: int
    loss: float | None
    tokens_per_second: float | None
    eta_s: float | None
    """Seconds left, counted from `last_event_s`."""
    parameters: int
    generation: int
    """Number of the current generation. 0: a run without a hub."""
    compression: float | None
    """Ratio of the traffic of a dense model in bfloat16 to the actual traffic."""
    bubble: float | None
    """Mean share of the time in which processes did not compute, 0 to 1."""
    slowest: str
    """Name of the process or peer that computes for the largest share of the time; empty if unknown."""
    stages: list[StageStatus]
    boundary_traffic: list[BoundaryTraffic]
    standbys: list[str]
    """Names of connected peers without a stage."""
    curve: list[tuple[int, float]]
    """Training loss: (step, mean loss), downsampled."""
    validations: list[tuple[int, float]]
    """Validation loss: (step, loss), downsampled."""
    recomputed: list[tuple[int, float]]
    """Losses of steps that the hub has computed again from its commits: (step, loss), downsampled."""
    commit_losses: list[tuple[int, float]]
    """Loss of the hub's own batch: (step of the commit, loss), downsampled."""
    audit: str
    """What the hub has found last when it computed a reported loss again, in words; empty: nothing yet."""
    alarms: list[str]
    """Signs that what peers report or send is false, newest last."""
    recoveries: list[Recovery]
    exactness: str
    """Whether the run is still bit for bit that of an undisturbed one, in words; empty if unknown."""
    who_reads: str
    """Who can read the data of a hub's run, in one sentence; empty if unknown."""
    commit_alarm: str
    """Since when and why no commits come, in words; empty while they do."""
    notes: list[Note]
    """Recent events, newest last."""
