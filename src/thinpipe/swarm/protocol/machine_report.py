"""Measured compute, memory and link of a peer's machine, reported to the hub before segments are assigned. No torch
here."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from thinpipe.config.model_family import AttentionKernel
from thinpipe.core.events import PeerAssignment
from thinpipe.core.units import format_bit_rate, format_bytes, format_flops
from thinpipe.planning.partition import Machine
from thinpipe.swarm.protocol.decoding import sanitize

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
ShortText = Annotated[str, msgspec.Meta(max_length=200)]


class ProcessorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Compute device of a peer."""

    device: ShortText
    """Vendor's name of the device."""
    device_class: ShortText = ""
    """What must be alike for equal bits (`device.device_class`); empty: the device does not repeat its own bits."""
    threads: Annotated[int, msgspec.Meta(ge=1)]
    """Number of CPU threads that torch uses."""
    flops: PositiveFloat
    """Floating-point operations per second in matrix products of the model's sizes, forward and backward."""
    memory_nbytes: Annotated[int, msgspec.Meta(ge=0)]
    """Memory of the device that a run may use, in bytes."""
    host_memory_nbytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Memory of the host that a run may use beside that of the device, in bytes, for offloaded optimiser state. None:
    the device computes in the host's memory, or the peer's version does not tell."""
    attention: AttentionKernel = "fused"
    """Kernel of the model's attention on this device: it decides how much memory a segment takes."""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Compute and link of a peer, as the peer reports them.

    Untrusted: values that are not finite and positive (the latency may be 0) are rejected while decoding, but nothing
    proves that they are true. A peer that overstates its speed is a bottleneck that `Partition.loads` does not show.
    """

    processor: ProcessorReport
    up_bps: PositiveFloat
    """Payload rate from the peer to the hub, in bits per second."""
    down_bps: PositiveFloat
    """Payload rate from the hub to the peer, in bits per second."""
    latency_s: Annotated[float, msgspec.Meta(ge=0)]
    """Round-trip time between peer and hub, in seconds."""
    versions: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=20)]
    """Versions of installed packages, by name."""

    def __post_init__(self) -> None:
        numbers = (self.processor.flops, self.up_bps, self.down_bps, self.latency_s)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("a machine's figures must be finite")

    def in_words(self) -> str:
        return (
            f"this machine: {format_flops(self.processor.flops)}, {format_bytes(self.processor.memory_nbytes)} of "
            f"memory; link: {format_bit_rate(self.up_bps)} up, {format_bit_rate(self.down_bps)} down, "
            f"round trip {self.latency_s * 1e3:.0f} ms"
        )

    def machine(self, name: str) -> Machine:
        """The report as an input of `make_partition`."""
        return Machine(
            name=name,
            flops=self.processor.flops,
            memory_nbytes=self.processor.memory_nbytes,
            host_memory_nbytes=self.processor.host_memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
            device_class=sanitize(self.processor.device_class),
            attention=self.processor.attention,
        )

    def place(self, name: str, segments: Sequence[int]) -> PeerAssignment:
        """The report and the assigned segments as an entry of the event log."""
        return PeerAssignment(
            name=name,
            segments=list(segments),
            device=sanitize(self.processor.device),
            device_class=sanitize(self.processor.device_class),
            flops=self.processor.flops,
            memory_nbytes=self.processor.memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
            latency_s=self.latency_s,
        )
