"""Schema of a machines file, the input of `thinpipe plan`. Invalid values raise UserError in `__post_init__`."""

from dataclasses import dataclass
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_bytes, parse_duration, parse_rate

Duplex = Literal["full", "shared"]
LatencyPer = Literal["pipelined", "message"]


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """One machine, or `count` identical machines."""

    name: str | None = None
    """Name of the machine. None: the name of its device."""
    device: str | None = None
    """Name in the table of known devices (planning/devices.py), for example RTX 4090."""
    tflops: float | None = None
    """Dense TFLOP/s that training reaches in the run's precision; overrides the value known for the device."""
    memory: str | None = None
    """Memory available to the run, for example 24GB. None: the device's memory."""
    pass_overhead: str = "0ms"
    """Fixed time per forward or backward pass of a micro-batch, for example 5ms; matters when a pass is short."""
    host_memory: str | None = None
    """Memory of the computer around a card that a run may use, for optimiser state with training.offload. None: not
    known, taken as enough."""
    overhead: str | None = None
    """Part of the memory taken by context, libraries and fragmentation. None: as measured by `thinpipe selftest` on
    this machine for the device, else an assumption, which the plan prints."""
    copy_rate: str | None = None
    """Rate of copies between a card and its computer's memory, for training.offload, in bits per second as links are,
    for example 96gbps. None: as measured by `thinpipe selftest`, else an assumption."""
    up: str | None = None
    """Uplink rate, for example 20mbps. None: unlimited."""
    down: str | None = None
    """Downlink rate, for example 80mbps. None: unlimited."""
    latency: str = "0ms"
    """One-way latency to the hub or, without a hub, to the next machine: half of a ping's round-trip time."""
    price: float = 0.0
    """Price per hour and machine."""
    count: int = 1
    """Number of identical machines; their names end in -1, -2 and so on."""
    host: str | None = None
    """Name of the computer. Machines with the same host are processes of one computer and share its cores."""
    cores: float | None = None
    """Number of this host's machines that can compute at full speed at the same time."""
    duplex: Duplex | None = None
    """full: uplink and downlink are independent. shared: sending and receiving share one rate. None: the file's
    duplex."""
    latency_per: LatencyPer | None = None
    """pipelined: a message may be sent while the one before is still in flight. message: the link is occupied for the
    latency of each message. None: the file's latency_per."""

    def __post_init__(self) -> None:
        if self.device is None and self.tflops is None:
            raise UserError(f"{self._where}: say how fast it is: device, for example RTX 4090, or tflops")
        if self.name is None and self.device is None:
            raise UserError("a machine without a device needs a name")
        for name in ("tflops", "count", "cores"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{self._where}: {name} must be above 0, not {value}")
        if not self.price >= 0:
            raise UserError(f"{self._where}: price must be at least 0, not {self.price}")
        if self.cores is not None and self.host is None:
            raise UserError(f"{self._where}: cores are shared by machines of one host: set host, or leave cores out")
        _check_quantities(
            self._where,
            memory=self.memory,
            host_memory=self.host_memory,
            copy_rate=self.copy_rate,
            overhead=self.overhead,
            pass_overhead=self.pass_overhead,
            up=self.up,
            down=self.down,
            latency=self.latency,
        )

    @property
    def display_name(self) -> str:
        return self.name or self.device or "without a name"

    @property
    def _where(self) -> str:
        return f"machine {self.display_name!r}"


@dataclass(frozen=True, kw_only=True)
class HubLinkSettings:
    """Internet link of the hub, through which all messages pass."""

    up: str | None = None
    """Uplink rate, for example 100mbps. None: unlimited."""
    down: str | None = None
    """Downlink rate, for example 100mbps. None: unlimited."""
    latency: str = "0ms"
    """One-way latency, added to the latency of the machine at the other end."""

    def __post_init__(self) -> None:
        _check_quantities("hub", up=self.up, down=self.down, latency=self.latency)


@dataclass(frozen=True, kw_only=True)
class RentedCard:
    """A card that could be rented instead, with which `thinpipe plan` compares."""

    device: str
    """Name in the table of known devices (planning/devices.py), for example H100."""
    price: float
    """Price per hour, in the file's currency."""

    def __post_init__(self) -> None:
        if not self.price >= 0:
            raise UserError(f"rented.price must be at least 0, not {self.price}")


@dataclass(frozen=True, kw_only=True)
class MachinesFile:
    """Content of a machines file: one [[machine]] table per machine, and defaults for all machines."""

    machine: tuple[MachineConfig, ...] = ()
    hub: HubLinkSettings | None = None
    """The hub's link. None: no hub, machines send to each other directly."""
    rented: RentedCard | None = None
    """A card that could be rented instead. None: the cheapest of some, at assumed prices."""
    currency: str = "USD"
    """Currency of prices."""
    efficiency: float = 0.35
    """Fraction of a device's peak FLOP/s that training reaches."""
    duplex: Duplex = "full"
    """Default duplex of machines."""
    latency_per: LatencyPer = "pipelined"
    """Default latency_per of machines."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise UserError(f"efficiency must be above 0 and at most 1, not {self.efficiency}: 0.35 is 35 %")


def _check_quantities(where: str, **quantities: str | None) -> None:
    readers = {
        "memory": parse_bytes,
        "host_memory": parse_bytes,
        "overhead": parse_bytes,
        "pass_overhead": parse_duration,
        "latency": parse_duration,
    }
    for name, text in quantities.items():
        if text is None:
            continue
        try:
            readers.get(name, parse_rate)(text)
        except UserError as error:
            raise UserError(f"{where}: {name}: {error}") from None
