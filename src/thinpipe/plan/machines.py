"""The machines of a plan: from a file, or as the peers of a hub were measured.

Nothing is measured here. What a file leaves to us is told as an assumption, which plans print.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from thinpipe.core.config import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_bytes, parse_duration, parse_rate
from thinpipe.plan.devices import Precision, find_device
from thinpipe.plan.machine_settings import Duplex, LatencyPer, MachineSection, MachinesFile
from thinpipe.swarm.assign import Machine as Measured
from thinpipe.swarm.status import Status


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    flops: float
    """Floating-point operations a second that training reaches, of one process that has its device to itself."""
    memory_nbytes: int
    """That a run may use."""
    up_bps: float = math.inf
    down_bps: float = math.inf
    latency_s: float = 0.0
    """One way, to the hub or to a neighbour."""
    price_per_hour: float = 0.0
    host: str | None = None
    """Machines of one host share its processors."""
    cores: float | None = None
    """Processors of the host; so many of its machines compute at full speed at once."""
    duplex: Duplex = "full"
    latency_per: LatencyPer = "pipelined"
    pass_s: float = 0.0
    """What every pass of a micro-batch costs beside its operations: Python, launching kernels, handing over."""
    overhead_nbytes: int = 0
    """Of its memory: Python, torch and its libraries, beside all tensors."""

    def for_assigning(self) -> Measured:
        """As a hub would know it."""
        return Measured(
            name=self.name,
            flops=self.flops,
            memory_nbytes=max(0, self.memory_nbytes - self.overhead_nbytes),
            up_bps=self.up_bps,
            down_bps=self.down_bps,
        )


@dataclass(frozen=True, kw_only=True)
class Hub:
    up_bps: float = math.inf
    down_bps: float = math.inf
    latency_s: float = 0.0
    """One way, added to that of the machine at the other end."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    machines: tuple[Machine, ...]
    hub: Hub | None = None
    """None: machines reach each other directly."""
    currency: str = "USD"
    assumptions: tuple[str, ...] = ()
    """What nobody measured or said, in words."""


def load_machines(path: Path, *, precision: Precision = "bf16") -> Machines:
    """`precision`: of the run's matrix products (`devices.precision_of`), for devices of the table."""
    file = load_toml(path, MachinesFile)
    try:
        return _resolve(file, precision)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def from_status(status: Status) -> Machines:
    """As the peers that are there were measured."""
    measured = [(peer.name, peer.report) for peer in status.peers if peer.report is not None]
    if not measured:
        raise UserError("no peer has been measured yet: wait until `thinpipe status` shows figures of one")
    machines = tuple(
        Machine(
            name=name,
            flops=report.processor.flops,
            memory_nbytes=report.processor.memory_nbytes,
            up_bps=report.up_bps,
            down_bps=report.down_bps,
            latency_s=report.latency_s / 2,
        )
        for name, report in measured
    )
    assumptions = ["measured speeds are of matrix products alone: whole steps are slower"]
    assumptions += [f"{peer.name} is not measured yet and left out" for peer in status.peers if peer.report is None]
    up_bps, down_bps = status.hub_bps
    return Machines(machines=machines, hub=Hub(up_bps=up_bps, down_bps=down_bps), assumptions=tuple(assumptions))


def _resolve(file: MachinesFile, precision: Precision) -> Machines:
    if not file.machine:
        raise UserError("there is no [[machine]]: write one for each machine, or one with count for several alike")
    machines: list[Machine] = []
    assumptions: list[str] = []
    cores = _cores_by_host(file.machine)
    for section in file.machine:
        flops, memory_nbytes, assumed = _processor(section, file.efficiency, precision)
        machine = Machine(
            name=section.called,
            flops=flops,
            memory_nbytes=memory_nbytes,
            up_bps=_rate(section.up),
            down_bps=_rate(section.down),
            latency_s=parse_duration(section.latency),
            price_per_hour=section.price,
            host=section.host,
            cores=None if section.host is None else cores.get(section.host),
            duplex=section.duplex or file.duplex,
            latency_per=section.latency_per or file.latency_per,
            pass_s=parse_duration(section.pass_overhead),
            overhead_nbytes=int(parse_bytes(section.overhead)),
        )
        names = [f"{machine.name}-{n}" for n in range(1, section.count + 1)] if section.count > 1 else [machine.name]
        machines += [replace(machine, name=name) for name in names]
        assumptions += assumed + _unlimited(section.called, section.up, section.down)
    _refuse_equal_names(machines)
    hub = None
    if file.hub is not None:
        latency_s = parse_duration(file.hub.latency)
        hub = Hub(up_bps=_rate(file.hub.up), down_bps=_rate(file.hub.down), latency_s=latency_s)
        assumptions += _unlimited("the hub", file.hub.up, file.hub.down)
    return Machines(
        machines=tuple(machines), hub=hub, currency=file.currency, assumptions=tuple(dict.fromkeys(assumptions))
    )


def _processor(section: MachineSection, efficiency: float, precision: Precision) -> tuple[float, int, list[str]]:
    """Operations a second, memory, and what is assumed."""
    flops, memory_nbytes, assumed = (section.tflops or 0.0) * 1e12, 0.0, []
    if section.device is not None:
        known, device = find_device(section.device)
        memory_nbytes = 1e9 * (device.memory_gb or 0)
        if section.tflops is None:
            peak = device.peak_flops(precision)
            flops = efficiency * peak
            assumed = [f"{known}: {efficiency:.0%} of its peak of {peak / 1e12:.4g} TFLOP/s in {precision}"]
    if section.memory is not None:
        memory_nbytes = parse_bytes(section.memory)
    if not memory_nbytes:
        raise UserError(f'machine {section.called!r}: say how much memory a run may use, such as memory = "24GB"')
    return flops, int(memory_nbytes), assumed


def _cores_by_host(sections: tuple[MachineSection, ...]) -> dict[str, float]:
    cores: dict[str, float] = {}
    for section in sections:
        if section.host is None or section.cores is None:
            continue
        if cores.setdefault(section.host, section.cores) != section.cores:
            raise UserError(f"host {section.host!r} has {cores[section.host]:g} cores and {section.cores:g}: say one")
    return cores


def _refuse_equal_names(machines: list[Machine]) -> None:
    names = [machine.name for machine in machines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two machines are called {twice!r}: give them names, or write one with count = 2")


def _rate(text: str | None) -> float:
    return math.inf if text is None else parse_rate(text)


def _unlimited(name: str, up: str | None, down: str | None) -> list[str]:
    missing = [side for side, rate in (("up", up), ("down", down)) if rate is None]
    return [f"the line of {name} is not said ({' and '.join(missing)}): taken as no limit"] if missing else []
