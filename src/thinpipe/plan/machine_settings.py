"""What may stand in a machines file, field by field. What cannot be is refused here, before anything is counted."""

from dataclasses import dataclass
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_bytes, parse_duration, parse_rate

Duplex = Literal["full", "shared"]
LatencyPer = Literal["pipelined", "message"]


@dataclass(frozen=True, kw_only=True)
class MachineSection:
    """One machine, or several alike."""

    name: str | None = None
    """None: that of its device."""
    device: str | None = None
    """A name of the table of devices, for example RTX 4090."""
    tflops: float | None = None
    """What training reaches, in dense operations of the run's precision; beats what is known of the device."""
    memory: str | None = None
    """That a run may use, for example 24GB. None: that of the device."""
    pass_overhead: str = "0ms"
    """What every pass of a micro-batch costs beside its operations, for example 5ms: counts where these are few."""
    overhead: str = "500MB"
    """Of its memory: Python, torch and its libraries."""
    up: str | None = None
    """For example 20mbps. None: as fast as can be."""
    down: str | None = None
    latency: str = "0ms"
    """One way, to the hub or to a neighbour: half of what ping shows."""
    price: float = 0.0
    """Of an hour, of each."""
    count: int = 1
    """So many alike; their names end in -1, -2 and so on."""
    host: str | None = None
    """Machines with the same host are processes of one computer and share its cores."""
    cores: float | None = None
    """Of the host: so many of its machines compute at full speed at once."""
    duplex: Duplex | None = None
    """full: up and down at once; shared: one rate for both. None: as the file says."""
    latency_per: LatencyPer | None = None
    """pipelined: messages travel behind each other; message: the line waits out the latency of each. None: as the file
    says."""

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
            overhead=self.overhead,
            pass_overhead=self.pass_overhead,
            up=self.up,
            down=self.down,
            latency=self.latency,
        )

    @property
    def called(self) -> str:
        return self.name or self.device or "without a name"

    @property
    def _where(self) -> str:
        return f"machine {self.called!r}"


@dataclass(frozen=True, kw_only=True)
class HubSection:
    """The computer through which all messages go."""

    up: str | None = None
    down: str | None = None
    latency: str = "0ms"
    """One way, added to that of the machine at the other end."""

    def __post_init__(self) -> None:
        _check_quantities("hub", up=self.up, down=self.down, latency=self.latency)


@dataclass(frozen=True, kw_only=True)
class MachinesFile:
    """A [[machine]] for every machine, and what holds for all."""

    machine: tuple[MachineSection, ...] = ()
    hub: HubSection | None = None
    """None: machines reach each other directly."""
    currency: str = "USD"
    """Of prices."""
    efficiency: float = 0.35
    """The share of a device's peak that training reaches."""
    duplex: Duplex = "full"
    latency_per: LatencyPer = "pipelined"

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise UserError(f"efficiency must be above 0 and at most 1, not {self.efficiency}: 0.35 is 35 %")


def _check_quantities(where: str, **quantities: str | None) -> None:
    readers = {
        "memory": parse_bytes,
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
