"""Prometheus scraped, TensorBoard's files read back, and what is said when a package is not there."""

import sys

import httpx
import pytest

from tests.monitor.sample_events import link, step
from thinpipe.core.errors import UserError
from thinpipe.core.events import SourceLoss, Validated
from thinpipe.core.hub_events import PeerLeft
from thinpipe.monitor.exporters import EXPORTERS, ExporterSettings, Prometheus, TensorBoard, open_exporters

STEP = step(3, links=[link(0, True)], busy=[0.5, 1.0], memory=[10, 20])
VALIDATED = Validated(step=3, loss=4.0, bits_per_byte=None, tokens=1, seconds=1.0)


def test_prometheus_scrapes_what_was_told_last(tmp_path):
    exporter = Prometheus(ExporterSettings(folder=tmp_path, prometheus=0))
    try:
        exporter.on_event(step(2))
        exporter.on_event(STEP)
        exporter.on_event(VALIDATED)
        exporter.on_event(PeerLeft(step=3, peer="anna", cause="left", reason="anna left"))
        told = httpx.get(f"http://127.0.0.1:{exporter.port}/metrics", timeout=120).text.splitlines()
    finally:
        exporter.close()
    assert "thinpipe_step 3.0" in told
    assert f"thinpipe_loss {STEP.loss}" in told
    assert 'thinpipe_memory_nbytes{part="process_1"} 20.0' in told
    assert 'thinpipe_mbps{part="boundary_0_forward"} 2.0' in told
    assert "thinpipe_validation_loss 4.0" in told
    assert "thinpipe_peers_left_total 1.0" in told


def test_tensorboard_reads_what_was_told(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exporter = TensorBoard(ExporterSettings(folder=tmp_path, tensorboard=True))
    for event in (step(1), STEP, VALIDATED):
        exporter.on_event(event)
    exporter.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, round(scalar.value, 4)) for scalar in found.Scalars("loss")] == [(1, 4.99), (3, 4.97)]
    assert [scalar.value for scalar in found.Scalars("validation_loss")] == [4.0]
    assert [scalar.value for scalar in found.Scalars("busy/process_1")] == [1.0]


def test_only_those_that_are_asked_for_are_opened(tmp_path):
    assert list(open_exporters(ExporterSettings(folder=tmp_path))) == []
    (exporter,) = open_exporters(ExporterSettings(folder=tmp_path, prometheus=0))
    exporter.close()


def test_prometheus_has_the_validation_loss_of_a_mixture_and_of_its_sources(tmp_path):
    exporter = Prometheus(ExporterSettings(folder=tmp_path, prometheus=0))
    try:
        losses = [SourceLoss(name=name, loss=loss, bits_per_byte=None, tokens=8) for name, loss in (("a", 2), ("b", 4))]
        for sources in (losses, []):
            exporter.on_event(
                Validated(step=1, loss=3.0, bits_per_byte=None, tokens=16, seconds=1.0, time_s=1.0, sources=sources)
            )
        page = httpx.get(f"http://127.0.0.1:{exporter.port}/metrics", timeout=120).text
    finally:
        exporter.close()
    for part, loss in (("a", 2.0), ("b", 4.0), ("", 3.0)):
        assert f'thinpipe_validation_loss{{part="{part}"}} {loss}' in page


@pytest.mark.parametrize(
    ("name", "package", "value"), [("prometheus", "prometheus_client", 0), ("wandb", "wandb", "project")]
)
def test_a_missing_extra_is_said(tmp_path, monkeypatch, name, package, value):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf'pip install "thinpipe\[{name}\]"'):
        EXPORTERS[name](ExporterSettings(folder=tmp_path, **{name: value}))


def test_a_taken_port_is_said(tmp_path):
    first = Prometheus(ExporterSettings(folder=tmp_path, prometheus=0))
    try:
        with pytest.raises(UserError, match=r"metrics\.prometheus .* choose another port"):
            Prometheus(ExporterSettings(folder=tmp_path, prometheus=first.port))
    finally:
        first.close()
