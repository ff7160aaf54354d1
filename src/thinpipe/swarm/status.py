"""How a run is doing, as the hub sees it, and as a table for people."""

from typing import TYPE_CHECKING

import msgspec

from thinpipe.core.units import format_bytes, say_flops
from thinpipe.swarm.reports import MachineReport

if TYPE_CHECKING:
    from rich.console import RenderableType


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    segments: int
    """0: a spare, or nothing is computed now."""
    report: MachineReport | None
    """None: it is not measured yet."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    epoch: int
    """0: nothing is computed now."""
    waits_for: str
    """Why not, in words."""
    peers: list[PeerStatus]
    away: list[str]
    """Peers that belong but are not there."""
    bottleneck: str
    """The slowest part, in words."""
    hub_bps: tuple[float, float]
    """Of the hub's line, up and down."""
    progress: dict[str, float]
    time_s: float = 0.0
    """By the hub's clock, since 1970; 0: it does not say."""
    commits: str = ""
    """How often the state is made safe, and how much work can be lost, in words."""


def render(status: Status) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table

    table = Table("peer", "segments", "device", "processor", "memory", "up / down Mbps", "round trip")
    for peer in status.peers:
        table.add_row(peer.name, str(peer.segments or "-"), *_figures(peer.report))
    lines = [f"run {status.run}: " + (f"epoch {status.epoch}" if status.epoch else f"waits: {status.waits_for}")]
    if status.progress:
        numbers = status.progress
        lines.append(
            f"step {numbers['step']:.0f} of {numbers['steps']:.0f}, loss {numbers['loss']:.4f}, "
            f"{numbers['tokens_per_second']:,.0f} tokens/s"
        )
    if status.commits:
        lines.append(status.commits)
    if status.bottleneck:
        lines.append(f"slowest part: {status.bottleneck}")
    up, down = status.hub_bps
    lines.append(f"the hub's line: {_mbps(up)} Mbps up, {_mbps(down)} Mbps down")
    if status.away:
        lines.append(f"not there: {', '.join(status.away)}")
    return Group(*lines, table)


def _figures(report: MachineReport | None) -> tuple[str, ...]:
    if report is None:
        return ("is being measured",)
    return (
        report.processor.device,
        say_flops(report.processor.flops),
        format_bytes(report.processor.memory_nbytes),
        f"{_mbps(report.up_bps)} / {_mbps(report.down_bps)}",
        f"{report.latency_s * 1e3:.0f} ms",
    )


def _mbps(bits_per_second: float) -> str:
    if bits_per_second == float("inf"):
        return "not measured"
    return f"{bits_per_second / 1e6:.0f}"
