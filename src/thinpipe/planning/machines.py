"""Machines of a plan, read from a machines file (peers of a hub come from `swarm/protocol/status.py`).

Nothing is measured here. Values that the file leaves open are assumed, and the assumption is printed with the plan.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from thinpipe.config.machines import Duplex, LatencyPer, MachineConfig, MachinesFile, RentedCard
from thinpipe.config.model_family import AttentionKernel
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes, parse_bytes, parse_duration, parse_rate
from thinpipe.planning.calibration import Calibration, load_calibrations
from thinpipe.planning.devices import RENTED_USD_PER_HOUR, Precision, find_device, is_same_device
from thinpipe.planning.memory_budget import (
    CONTEXT_NBYTES,
    COPY_BYTES_PER_SECOND,
    FRAGMENTATION_SHARE,
    PROCESS_NBYTES,
)
from thinpipe.planning.partition import Machine as Measured


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One process with its device and its link."""

    name: str
    flops: float
    """FLOP/s that training reaches in one process that has the device to itself."""
    memory_nbytes: int
    """Bytes of memory that a run may use, `overhead_nbytes` included."""
    up_bps: float = math.inf
    down_bps: float = math.inf
    latency_s: float = 0.0
    """One-way latency to the hub, or without a hub to a neighbour in the pipeline."""
    price_per_hour: float = 0.0
    host: str | None = None
    """Name of the host; machines with the same host share its cores. None: a host of its own."""
    cores: float | None = None
    """Cores of the host: the number of its machines that can compute at full speed at once. None: no limit."""
    duplex: Duplex = "full"
    latency_per: LatencyPer = "pipelined"
    pass_s: float = 0.0
    """Fixed seconds per pass of a micro-batch, beside its FLOPs: Python, kernel launches, handing over tensors."""
    overhead_nbytes: int = 0
    """Bytes of memory beside all tensors: context, libraries, fragmentation; on a CPU Python and torch."""
    host_memory_nbytes: float | None = math.inf
    """Bytes of the host's memory that a run may use, beside `memory_nbytes`; infinite: not known. None: the device
    computes in the host's memory."""
    copy_bytes_per_second: float = COPY_BYTES_PER_SECOND
    """Rate of copies between the device and its host."""
    attention: AttentionKernel = "fused"
    """Kernel of attention in training."""
    activation_factor: float = 1.0
    """Measured activations divided by predicted ones."""

    @property
    def is_host(self) -> bool:
        """True if the device computes in the host's memory."""
        return self.host_memory_nbytes is None

    def as_assignable(self) -> Measured:
        """The machine as the partitioning rule of the hub sees it."""
        return Measured(
            name=self.name,
            flops=self.flops,
            memory_nbytes=max(0, self.memory_nbytes - self.overhead_nbytes),
            host_memory_nbytes=self.host_memory_nbytes,
            up_bps=self.up_bps,
            down_bps=self.down_bps,
            attention=self.attention,
        )


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Link of the hub that relays all messages."""

    up_bps: float = math.inf
    down_bps: float = math.inf
    latency_s: float = 0.0
    """One-way latency, added to that of the machine at the other end."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    machines: tuple[Machine, ...]
    hub: Hub | None = None
    """None: machines are connected directly."""
    rented: tuple[Machine, ...] = ()
    """Cards that could be rented instead, with their prices."""
    rented_price_assumed: bool = True
    """Whether the prices of `rented` are those of the shipped table."""
    currency: str = "USD"
    assumptions: tuple[str, ...] = ()
    """Values that were neither measured nor given, one sentence each."""


def load_machines(path: Path, *, precision: Precision = "bf16") -> Machines:
    """Reads a machines file; raises UserError. `precision`: that of the run's matrix products (`devices.precision_of`),
    for the peak FLOP/s of devices that are given by name."""
    file = load_toml(path, MachinesFile)
    try:
        return _resolve(file, precision)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _resolve(file: MachinesFile, precision: Precision) -> Machines:
    if not file.machine:
        raise UserError("there is no [[machine]]: write one for each machine, or one with count for several alike")
    machines: list[Machine] = []
    assumptions: list[str] = []
    cores = _cores_by_host(file.machine)
    for section in file.machine:
        measured = _calibration_of(section.device)
        flops, memory_nbytes, assumed = _processor(section, file.efficiency, precision, measured)
        overhead_nbytes, assumed_overhead = _overhead(section, memory_nbytes, measured)
        machine = Machine(
            name=section.display_name,
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
            overhead_nbytes=overhead_nbytes,
            host_memory_nbytes=_host_memory(section),
            copy_bytes_per_second=_copy_rate(section, measured),
            attention=measured.attention or "fused",
            activation_factor=measured.activation_factor or 1.0,
        )
        assumed += assumed_overhead
        names = [f"{machine.name}-{n}" for n in range(1, section.count + 1)] if section.count > 1 else [machine.name]
        machines += [replace(machine, name=name) for name in names]
        assumptions += assumed + _unlimited(section.display_name, section.up, section.down)
    _refuse_equal_names(machines)
    hub = None
    if file.hub is not None:
        latency_s = parse_duration(file.hub.latency)
        hub = Hub(up_bps=_rate(file.hub.up), down_bps=_rate(file.hub.down), latency_s=latency_s)
        assumptions += _unlimited("the hub", file.hub.up, file.hub.down)
    return Machines(
        machines=tuple(machines),
        hub=hub,
        rented=rented_cards(precision, file.efficiency, file.rented),
        rented_price_assumed=file.rented is None,
        currency=file.currency,
        assumptions=tuple(dict.fromkeys(assumptions)),
    )


def rented_cards(
    precision: Precision, efficiency: float = MachinesFile().efficiency, named: RentedCard | None = None
) -> tuple[Machine, ...]:
    """The card that a machines file names, or those of the shipped table with their assumed prices."""
    prices = RENTED_USD_PER_HOUR if named is None else {named.device: named.price}
    cards = []
    for name, price in prices.items():
        section = MachineConfig(device=name, price=price)
        flops, memory_nbytes, _ = _processor(section, efficiency, precision, Calibration())
        overhead_nbytes, _ = _overhead(section, memory_nbytes, Calibration())
        known = find_device(name)[0]
        cards.append(
            Machine(
                name=known,
                flops=flops,
                memory_nbytes=memory_nbytes,
                overhead_nbytes=overhead_nbytes,
                price_per_hour=price,
            )
        )
    return tuple(cards)


def _calibration_of(device: str | None) -> Calibration:
    """What was measured on this machine for a device of this name; nothing for another device."""
    found = load_calibrations() if device is not None else {}
    names = {key: key.partition(": ")[2] for key in found}
    return next((found[key] for key, name in names.items() if is_same_device(name, device or "")), Calibration())


def _processor(
    section: MachineConfig, efficiency: float, precision: Precision, measured: Calibration
) -> tuple[float, int, list[str]]:
    """FLOP/s, memory bytes, and the assumptions behind them."""
    flops, memory_nbytes, assumed = (section.tflops or 0.0) * 1e12, 0.0, []
    if section.device is not None:
        known, device = find_device(section.device)
        memory_nbytes = 1e9 * (device.memory_gb or 0)
        sustained = [measured.flops[recipe] for recipe in _RECIPES_OF[precision] if recipe in measured.flops]
        if section.tflops is None and sustained:
            flops = max(sustained)
        elif section.tflops is None:
            peak = device.peak_flops(precision)
            flops = efficiency * peak
            assumed = [f"{known}: {efficiency:.0%} of its peak of {peak / 1e12:.4g} TFLOP/s in {precision}"]
    if section.memory is not None:
        memory_nbytes = parse_bytes(section.memory)
    if not memory_nbytes:
        raise UserError(f'machine {section.display_name!r}: say how much memory a run may use, such as memory = "24GB"')
    return flops, int(memory_nbytes), assumed


_RECIPES_OF: dict[Precision, tuple[str, ...]] = {"bf16": ("bf16-mixed", "bf16"), "fp32": ("fp32",)}


def _is_card(section: MachineConfig) -> bool:
    return section.device is not None and find_device(section.device)[1].memory_gb is not None


def _overhead(section: MachineConfig, memory_nbytes: int, measured: Calibration) -> tuple[int, list[str]]:
    """Bytes beside tensors, and the assumption behind them."""
    if section.overhead is not None:
        return int(parse_bytes(section.overhead)), []
    if not _is_card(section):
        nbytes = PROCESS_NBYTES if measured.overhead_nbytes is None else measured.overhead_nbytes
        return nbytes, [] if measured.overhead_nbytes else [f"{format_bytes(nbytes)} beside tensors (overhead)"]
    context, share = measured.overhead_nbytes, measured.fragmentation_share
    nbytes = (CONTEXT_NBYTES if context is None else context) + int(
        memory_nbytes * (FRAGMENTATION_SHARE if share is None else share)
    )
    assumed = (
        f"cards: {format_bytes(CONTEXT_NBYTES)} for context and libraries, {FRAGMENTATION_SHARE:.0%} of the memory for "
        "fragmentation (overhead)"
    )
    return nbytes, [assumed] if context is None or share is None else []


def _host_memory(section: MachineConfig) -> float | None:
    if section.host_memory is not None:
        return parse_bytes(section.host_memory)
    return math.inf if section.device is None or _is_card(section) else None


def _copy_rate(section: MachineConfig, measured: Calibration) -> float:
    if section.copy_rate is not None:
        return parse_rate(section.copy_rate) / 8
    rates = [rate for rate in (measured.to_device_bytes_per_second, measured.to_host_bytes_per_second) if rate]
    return min(rates, default=COPY_BYTES_PER_SECOND)


def _cores_by_host(sections: tuple[MachineConfig, ...]) -> dict[str, float]:
    """Raises UserError if two sections of the same host disagree."""
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
    """Assumption for the link directions whose rate is not given."""
    missing = [side for side, rate in (("up", up), ("down", down)) if rate is None]
    return [f"the link of {name} is not given ({' and '.join(missing)}): taken as no limit"] if missing else []
