"""Measured compute, memory and link of a peer's machine, reported to the hub before segments are assigned. No torch
here."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from thinpipe.config.model_family import AttentionKernel
from thinpipe.core.bounds import BitRate, Flops, Latency, Nbytes, ShortText, Word
from thinpipe.core.hub_events import PeerAssignment
from thinpipe.core.units import format_bit_rate, format_bytes, format_flops
from thinpipe.planning.partition import Machine


class ProcessorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Compute device of a peer."""

    device: ShortText
    """Vendor's name of the device."""
    device_class: ShortText = ""
    """What must be alike for equal bits (`device.device_class`); empty: the device does not repeat its own bits."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    """Number of CPU threads that torch uses."""
    flops: Flops
    """Floating-point operations per second in matrix products of the model's sizes, forward and backward."""
    memory_nbytes: Nbytes
    """Memory of the device that a run may use, in bytes."""
    host_memory_nbytes: Nbytes | None = None
    """Memory of the host that a run may use beside that of the device, in bytes, for offloaded optimiser state. None:
    the device computes in the host's memory, or the peer's version does not tell."""
    attention: AttentionKernel = "fused"
    """Kernel of the model's attention on this device: it decides how much memory a segment takes."""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Compute and link of a peer, as the peer reports them.

    Untrusted: values outside of `core.bounds` are refused while decoding, but nothing proves that the others are true.
    A peer that overstates its speed is a bottleneck that `Partition.loads` does not show.
    """

    processor: ProcessorReport
    up_bps: BitRate
    """Payload rate from the peer to the hub, in bits per second."""
    down_bps: BitRate
    """Payload rate from the hub to the peer, in bits per second."""
    latency_s: Latency
    """Round-trip time between peer and hub, in seconds."""
    versions: Annotated[dict[Word, Word], msgspec.Meta(max_length=20)]
    """Versions of installed packages, by name."""

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
            device_class=self.processor.device_class,
            attention=self.processor.attention,
        )

    def place(self, name: str, segments: Sequence[int]) -> PeerAssignment:
        """The report and the assigned segments as an entry of the event log."""
        return PeerAssignment(
            name=name,
            segments=list(segments),
            device=self.processor.device,
            device_class=self.processor.device_class,
            flops=self.processor.flops,
            memory_nbytes=self.processor.memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
            latency_s=self.latency_s,
        )
