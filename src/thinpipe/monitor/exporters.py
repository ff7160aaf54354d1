"""Metric exporters: Prometheus, TensorBoard, Weights & Biases.

Each needs an optional extra, imported only if the exporter is enabled. A new exporter is a class, an entry in
`EXPORTERS` and a setting of `metrics`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinpipe.config.commands import LOOPBACK
from thinpipe.core.audit_events import CommitMeasured, LossRecomputed
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Step, Validated
from thinpipe.core.extras import require_extra
from thinpipe.core.hub_events import PeerLeft


class Exporter(Protocol):
    def on_event(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ExporterSettings:
    """Exporter settings from the section `metrics` of a run, and the folder of the run."""

    folder: Path
    prometheus: int | None = None
    """Port of the metrics endpoint; 0 picks a free one. None: off."""
    tensorboard: bool = False
    wandb: str | None = None
    """Name of the W&B project. None: off."""


def scalars_of(event: AnyEvent) -> dict[str, float]:
    """Scalar metrics of an event; all exporters use these names."""
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
            found |= {f"validation_loss/{source.name}": source.loss for source in event.sources}
            return {name: value for name, value in found.items() if value is not None}
        case LossRecomputed():
            return {"recomputed_loss": event.recomputed}
        case CommitMeasured():
            return {"commit_loss": event.loss}
        case _:
            return {}


class Prometheus:
    """Gauges on a loopback HTTP endpoint. The part of a metric name after the slash becomes the label `part`."""

    def __init__(self, settings: ExporterSettings) -> None:
        assert settings.prometheus is not None
        require_extra("prometheus_client", extra="prometheus", feature="metrics.prometheus")
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, tuple[Any, bool]] = {}
        """Gauges by name, and whether they have parts."""
        self._peers_left = Counter("thinpipe_peers_left", "Peers that left or were lost.", registry=self._registry)
        try:
            self._server, self._thread = start_http_server(settings.prometheus, LOOPBACK, self._registry)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus {settings.prometheus} cannot be used ({error.strerror}): choose another port"
            ) from None
        self.port = int(self._server.server_port)

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, PeerLeft):
            self._peers_left.inc()
        step = {"step": float(event.step)} if isinstance(event, Step) else {}
        scalars = step | scalars_of(event)
        with_parts = {name.partition("/")[0] for name in scalars if "/" in name}
        for name, value in scalars.items():
            whole, _, part = name.partition("/")
            if whole not in self._gauges:
                labels = ["part"] if whole in with_parts else []
                gauge = self._gauge(f"thinpipe_{whole}", whole, labels, registry=self._registry)
                self._gauges[whole] = gauge, bool(labels)
            gauge, has_parts = self._gauges[whole]
            if has_parts:
                gauge.labels(part).set(value)  # to Prometheus an empty label is none
            elif not part:
                gauge.set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class TensorBoard:
    """TensorBoard event files in the run's folder."""

    def __init__(self, settings: ExporterSettings) -> None:
        require_extra("tensorboard", extra="tensorboard", feature="metrics.tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(settings.folder / "tensorboard"))

    def on_event(self, event: AnyEvent) -> None:
        for name, value in scalars_of(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time_s)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases run; with WANDB_MODE=offline its files stay in the run's folder."""

    def __init__(self, settings: ExporterSettings) -> None:
        require_extra("wandb", extra="wandb", feature="metrics.wandb")
        import wandb  # type: ignore[import-not-found,unused-ignore]

        self._run: Any = wandb.init(project=settings.wandb, name=settings.folder.name, dir=str(settings.folder))
        self._run.define_metric("*", step_metric="step")  # W&B's own step counter rejects repeated steps

    def on_event(self, event: AnyEvent) -> None:
        numbers = scalars_of(event)
        if numbers:
            self._run.log({"step": event.step, **numbers})

    def close(self) -> None:
        self._run.finish()


EXPORTERS: Mapping[str, Callable[[ExporterSettings], Exporter]] = {
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def open_exporters(settings: ExporterSettings) -> Iterator[Exporter]:
    """Opens the enabled exporters one by one, so that the caller can close the ones it has if the next one fails."""
    for name, make in EXPORTERS.items():
        asked = getattr(settings, name)
        if asked is not None and asked is not False:  # port 0 is enabled: any free port
            yield make(settings)
