"""Status of a run as reported by the hub, and its rendering for `thinpipe status`."""

from typing import TYPE_CHECKING, Annotated

import msgspec

from thinpipe.core.bounds import Clock, Count, GenerationNumber, HubRate, LongText, Name, Real, Word
from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes, format_flops
from thinpipe.planning.devices import Precision
from thinpipe.planning.machines import Hub, Machine, Machines, rented_cards
from thinpipe.swarm.protocol.machine_report import MachineReport

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_PEERS = 100_000
_PROGRESS = {"step", "steps", "loss", "tokens_per_second"}


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one present peer."""

    name: Name
    segments: Count
    """Number of segments that the peer computes; 0: it is a standby, or no generation is running."""
    report: MachineReport | None
    """Measured compute and link of the peer; None: not measured yet."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run: generation, peers, links and training progress."""

    run: LongText
    """Name of the run."""
    generation: GenerationNumber
    """Number of the running generation; 0: none is running."""
    waits_for: LongText
    """What the next generation waits for, in words; empty while one is running."""
    peers: Annotated[list[PeerStatus], msgspec.Meta(max_length=_MAX_PEERS)]
    """Present peers."""
    absent: Annotated[list[Name], msgspec.Meta(max_length=_MAX_PEERS)]
    """Names of the absent peers."""
    bottleneck: LongText
    """Slowest part of the pipeline, in words."""
    hub_bps: tuple[HubRate, HubRate] | None
    """Uplink and downlink rates of the hub in bits per second; None: not measured."""
    progress: Annotated[dict[Word, Real], msgspec.Meta(max_length=20)]
    """Training progress: step, steps, loss, tokens_per_second; empty before the first step."""
    time_s: Clock = 0.0
    """Hub's clock, in seconds since 1970; 0: unknown."""
    commit_summary: LongText = ""
    """Commit interval, newest commit and the amount of work that can be lost now, in words; an alarm if no commits
    come."""
    suspended: Annotated[dict[Name, LongText], msgspec.Meta(max_length=_MAX_PEERS)] = {}
    """Peers that compute nothing for a while, each with how long and why, in words."""
    who_reads: LongText = ""
    """Who can read the data, in one sentence."""
    reach: LongText = ""
    """Whether people elsewhere can reach the hub's address, in words; empty: nobody has tried."""
    exactness: LongText = ""
    """Whether the run is still bit for bit that of an undisturbed one, in words; empty before the first generation."""
    audit: LongText = ""
    """What the hub has found when it computed reported losses again, in words; empty before the first time."""
    alarms: Count = 0
    """Number of losses, commits and boundary figures that the hub disputes since its start."""
    troubles: Annotated[list[LongText], msgspec.Meta(max_length=_MAX_PEERS)] = []
    """Services of the hub that have failed, and peers that ask too much of one, in words."""

    def __post_init__(self) -> None:
        if self.progress and self.progress.keys() != _PROGRESS:
            raise ValueError(f"progress has {', '.join(sorted(_PROGRESS))}")


def render(status: Status) -> "RenderableType":
    """The status as a table for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("peer", "segments", "device", "processor", "memory", "up / down Mbps", "round trip")
    for peer in status.peers:
        row = (peer.name, str(peer.segments or "-"), *_figures(peer.report))
        table.add_row(*map(Text, row))  # plain text: square brackets are no markup
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
    if status.who_reads:
        lines.append(status.who_reads)
    if status.reach:
        lines.append(status.reach)
    if status.exactness:
        lines.append(f"numbers: {status.exactness}")
    if status.audit:
        lines.append(f"audit: {status.audit}")
    if status.alarms:
        lines.append(f"{status.alarms} ALARM(s) since the hub's start: `thinpipe watch` and the event log say of whom")
    lines += [f"suspended: {name} {why}" for name, why in status.suspended.items()]
    if status.bottleneck:
        lines.append(f"slowest part: {status.bottleneck}")
    if status.hub_bps is not None:
        up, down = status.hub_bps
        lines.append(f"the hub's link: {_mbps(up)} Mbps up, {_mbps(down)} Mbps down")
    lines += status.troubles
    if status.absent:
        lines.append(f"not connected: {', '.join(status.absent)}")
    return Group(*map(Text, lines), table)


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
    unmeasured = float("inf")
    up_bps, down_bps = status.hub_bps or (unmeasured, unmeasured)
    return Machines(
        machines=machines,
        hub=Hub(up_bps=up_bps, down_bps=down_bps),
        rented=rented_cards(precision),
        assumptions=tuple(assumptions),
    )
