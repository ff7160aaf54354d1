"""What `simulate` is given, and what it gives back."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from thinpipe.plan.actions import Action, Kind
from thinpipe.plan.lines import Framing, LineSpec

What = Literal["forward", "backward", "input", "weight", "send", "optimiser"]


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds for one micro-batch, alone on its processor. A whole backward pass is the sum of its two parts."""

    forward_s: float
    input_s: float
    weight_s: float

    def seconds(self, kind: Kind, *, first: bool) -> float:
        """torch has nothing to compute for the input of the first stage, and leaves all of it to the weights."""
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD or (first and kind is Kind.WEIGHT):
            return self.input_s + self.weight_s
        if kind is Kind.INPUT:
            return 0.0 if first else self.input_s
        return self.weight_s


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step."""

    actions: list[list[Action]]
    """Of each process."""
    works: list[StageWork]
    """Of each stage."""
    lines: list[LineSpec]
    """Of each process."""
    hub: LineSpec | None = None
    """All messages pass it. None: processes reach each other."""
    forward_nbytes: int
    """Payload of one micro-batch's message at a boundary."""
    backward_nbytes: int
    hosts: list[int] | None = None
    """The host of each process. None: each has its own."""
    cores: dict[int, float] | None = None
    """Of each host; one that is not named has enough."""
    exchange_nbytes: int = 0
    """What each process tells the others at the end of a step. 0: nothing, and nobody waits for the others."""
    optimiser_s: list[float] = field(default_factory=list)
    """Of each process; empty: no time."""
    framing: Framing | None = None
    """What the wire adds to a payload. None: as NATS with a hub, as gloo without."""


class Span(NamedTuple):
    """What occupied a process or a line, and when."""

    process: int
    """For a message, its sender; -1 is the hub."""
    what: What
    stage: int
    """-1 for the exchange and the optimiser, as is the micro-batch."""
    microbatch: int
    start: float
    end: float
    line: str = ""
    """For a message: up 0, down 1, hub up; or line 0 and hub, where both directions share it."""


@dataclass(frozen=True)
class Timeline:
    seconds: float
    spans: list[Span]
    busy: list[float]
    """How long each process computed."""
    line_busy: dict[str, float]
    line_nbytes: dict[str, int]

    @property
    def bubble(self) -> float:
        """The share of the step in which processes did not compute, on average."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds if self.seconds else 0.0
