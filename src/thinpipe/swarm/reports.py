"""What a peer tells the hub of its machine before it is given segments. No torch here: the hub needs none."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from thinpipe.core.events import PeerPlace
from thinpipe.core.units import format_bytes, say_flops, say_rate
from thinpipe.swarm.assign import Machine
from thinpipe.swarm.reading import say

Above0 = Annotated[float, msgspec.Meta(gt=0)]
Words = Annotated[str, msgspec.Meta(max_length=200)]


class ProcessorReport(msgspec.Struct, frozen=True, kw_only=True):
    device: Words
    """As its maker calls it."""
    threads: Annotated[int, msgspec.Meta(ge=1)]
    flops: Above0
    """A second, in matrix products of the model's sizes, forward and backward."""
    memory_nbytes: Annotated[int, msgspec.Meta(ge=0)]
    """That a run may use."""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Comes from strangers: what is not a finite number above 0 is refused when it is decoded. Nothing proves that it
    is true; a peer that promises too much is the bottleneck that `Assignment.loads` does not show."""

    processor: ProcessorReport
    up_bps: Above0
    """To the hub, of payload."""
    down_bps: Above0
    latency_s: Annotated[float, msgspec.Meta(ge=0)]
    """There and back."""
    versions: Annotated[dict[Words, Words], msgspec.Meta(max_length=20)]

    def __post_init__(self) -> None:
        numbers = (self.processor.flops, self.up_bps, self.down_bps, self.latency_s)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("a machine's figures must be finite")

    def in_words(self) -> str:
        return (
            f"this machine: {say_flops(self.processor.flops)}, {format_bytes(self.processor.memory_nbytes)} of memory; "
            f"its line: {say_rate(self.up_bps)} up, {say_rate(self.down_bps)} down, "
            f"{self.latency_s * 1e3:.0f} ms there and back"
        )

    def machine(self, name: str) -> Machine:
        """As `assign` wants it."""
        return Machine(
            name=name,
            flops=self.processor.flops,
            memory_nbytes=self.processor.memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
        )

    def place(self, name: str, segments: Sequence[int]) -> PeerPlace:
        """As the event log wants it."""
        return PeerPlace(
            name=name,
            segments=list(segments),
            device=say(self.processor.device),
            flops=self.processor.flops,
            memory_nbytes=self.processor.memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
            latency_s=self.latency_s,
        )
