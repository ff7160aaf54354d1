"""Status of a run as reported by the hub, and its rendering for `thinpipe status`."""

from typing import TYPE_CHECKING

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes, format_flops
from thinpipe.planning.devices import Precision
from thinpipe.planning.machines import Hub, Machine, Machines, rented_cards
from thinpipe.swarm.protocol.machine_report import MachineReport

if TYPE_CHECKING:
    from rich.console import RenderableType


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one present peer."""

    name: str
    segments: int
    """Number of segments that the peer computes; 0: it is a standby, or no generation is running."""
    report: MachineReport | None
    """Measured compute and link of the peer; None: not measured yet."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run: generation, peers, links and training progress."""

    run: str
    """Name of the run."""
    generation: int
    """Number of the running generation; 0: none is running."""
    waits_for: str
    """What the next generation waits for, in words; empty while one is running."""
    peers: list[PeerStatus]
    """Present peers."""
    absent: list[str]
    """Names of the absent peers."""
    bottleneck: str
    """Slowest part of the pipeline, in words."""
    hub_bps: tuple[float, float]
    """Uplink and downlink rates of the hub in bits per second; infinite: not measured."""
    progress: dict[str, float]
    """Training progress: step, steps, loss, tokens_per_second; empty before the first step."""
    time_s: float = 0.0
    """Hub's clock, in seconds since 1970; 0: unknown."""
    commit_summary: str = ""
    """Commit interval and the amount of work that can be lost, in words."""
    exactness: str = ""
    """Whether the run is still bit for bit that of an undisturbed one, in words; empty before the first generation."""


def render(status: Status) -> "RenderableType":
    """The status as a table for the terminal."""
    from rich.console import Group
    from rich.table import Table

    table = Table("peer", "segments", "device", "processor", "memory", "up / down Mbps", "round trip")
    for peer in status.peers:
        table.add_row(peer.name, str(peer.segments or "-"), *_figures(peer.report))
    lines = [
        f"run {status.run}: "
        + (f"generation {status.generation}" if status.generation else f"waiting ({status.waits_for})")
    ]
    if status.progress:
        numbers = status.progress
        lines.append(
            f"step {numbers['step']:.0f} of {numbers['steps']:.0f}, loss {numbers['loss']:.4f}, "
            f"{numbers['tokens_per_second']:,.0f} tokens/s"
        )
    if status.commit_summary:
        lines.append(status.commit_summary)
    if status.exactness:
        lines.append(f"numbers: {status.exactness}")
    if status.bottleneck:
        lines.append(f"slowest part: {status.bottleneck}")
    up, down = status.hub_bps
    lines.append(f"the hub's link: {_mbps(up)} Mbps up, {_mbps(down)} Mbps down")
    if status.absent:
        lines.append(f"not connected: {', '.join(status.absent)}")
    return Group(*lines, table)


def _figures(report: MachineReport | None) -> tuple[str, ...]:
    if report is None:
        return ("not measured yet",)
    return (
        report.processor.device,
        format_flops(report.processor.flops),
        format_bytes(report.processor.memory_nbytes),
        f"{_mbps(report.up_bps)} / {_mbps(report.down_bps)}",
        f"{report.latency_s * 1e3:.0f} ms",
    )


def _mbps(bits_per_second: float) -> str:
    if bits_per_second == float("inf"):
        return "not measured"
    return f"{bits_per_second / 1e6:.0f}"


def machines_from_status(status: Status, precision: Precision) -> Machines:
    """Measured machines of the present peers, as an input of `thinpipe plan`, whose `precision` is that of the run.
    Raises UserError if no peer is measured."""
    measured = [(peer.name, peer.report) for peer in status.peers if peer.report is not None]
    if not measured:
        raise UserError("no peer has been measured yet: wait until `thinpipe status` shows the speed of a peer")
    machines = tuple(
        Machine(
            name=name,
            flops=report.processor.flops,
            memory_nbytes=report.processor.memory_nbytes,
            host_memory_nbytes=report.processor.host_memory_nbytes,
            up_bps=report.up_bps,
            down_bps=report.down_bps,
            latency_s=report.latency_s / 2,
            attention=report.processor.attention,
        )
        for name, report in measured
    )
    assumptions = ["measured speeds are those of matrix products: whole steps are slower"]
    assumptions += [
        f"{peer.name} is left out, because it is not measured yet" for peer in status.peers if peer.report is None
    ]
    up_bps, down_bps = status.hub_bps
    return Machines(
        machines=machines,
        hub=Hub(up_bps=up_bps, down_bps=down_bps),
        rented=rented_cards(precision),
        assumptions=tuple(assumptions),
    )
