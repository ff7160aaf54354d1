"""Other people's tools that a run may tell its events to: Prometheus, TensorBoard, Weights & Biases.

Each is an extra, imported when it is asked for. Adding one is a class, a line in `SINKS` and a setting.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Departed, Step, Validated
from thinpipe.core.extras import need
from thinpipe.live.settings import LOOPBACK


class Sink(Protocol):
    def tell(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """What `metrics` in the settings of a run says of sinks, and the folder of the run."""

    folder: Path
    prometheus: int | None = None
    tensorboard: bool = False
    wandb: str | None = None


def numbers_of(event: AnyEvent) -> dict[str, float]:
    """What can be drawn of an event, by names that all sinks share."""
    match event:
        case Step():
            numbers = {
                "loss": event.loss,
                "grad_norm": event.grad_norm,
                "lr": event.lr,
                "tokens": float(event.tokens),
                "tokens_per_second": event.tokens_per_second,
            }
            if event.bubble is not None:
                numbers["bubble"] = event.bubble
            numbers |= {f"memory_nbytes/process_{index}": float(held) for index, held in enumerate(event.memory)}
            numbers |= {f"busy/process_{index}": share for index, share in enumerate(event.busy)}
            for link in event.links:
                numbers[f"mbps/boundary_{link.boundary}_{'forward' if link.forward else 'back'}"] = link.mbps
            return numbers
        case Validated():
            found = {"validation_loss": event.loss, "validation_bits_per_byte": event.bits_per_byte}
            return {name: value for name, value in found.items() if value is not None}
        case _:
            return {}


class Prometheus:
    """Served on this machine alone; a name's last part, after the slash, is the label `part`."""

    def __init__(self, settings: SinkSettings) -> None:
        assert settings.prometheus is not None
        need("prometheus_client", extra="prometheus", what="metrics.prometheus")
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, Any] = {}
        self._departures = Counter("thinpipe_departures", "Peers that left or were lost.", registry=self._registry)
        try:
            self._server, self._thread = start_http_server(settings.prometheus, LOOPBACK, self._registry)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus {settings.prometheus} cannot be used ({error.strerror}): choose another port"
            ) from None
        self.port = int(self._server.server_port)

    def tell(self, event: AnyEvent) -> None:
        if isinstance(event, Departed):
            self._departures.inc()
        step = {"step": float(event.step)} if isinstance(event, Step) else {}
        for name, value in (step | numbers_of(event)).items():
            whole, _, part = name.partition("/")
            if whole not in self._gauges:
                labels = ["part"] if part else []
                self._gauges[whole] = self._gauge(f"thinpipe_{whole}", whole, labels, registry=self._registry)
            gauge = self._gauges[whole]
            (gauge.labels(part) if part else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class TensorBoard:
    """Files in the run's folder, for `tensorboard --logdir`."""

    def __init__(self, settings: SinkSettings) -> None:
        need("tensorboard", extra="tensorboard", what="metrics.tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(settings.folder / "tensorboard"))

    def tell(self, event: AnyEvent) -> None:
        for name, value in numbers_of(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time_s)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the folder."""

    def __init__(self, settings: SinkSettings) -> None:
        need("wandb", extra="wandb", what="metrics.wandb")
        import wandb  # type: ignore[import-not-found,unused-ignore]

        self._run: Any = wandb.init(project=settings.wandb, name=settings.folder.name, dir=str(settings.folder))
        self._run.define_metric("*", step_metric="step")  # W&B's own counter refuses steps that are computed again

    def tell(self, event: AnyEvent) -> None:
        numbers = numbers_of(event)
        if numbers:
            self._run.log({"step": event.step, **numbers})

    def close(self) -> None:
        self._run.finish()


SINKS: Mapping[str, Callable[[SinkSettings], Sink]] = {
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def open_sinks(settings: SinkSettings) -> Iterator[Sink]:
    """Those that are asked for, one after the other: each is to be closed, also when the next cannot be opened."""
    for name, make in SINKS.items():
        asked = getattr(settings, name)
        if asked is not None and asked is not False:  # port 0 is any that is free
            yield make(settings)
