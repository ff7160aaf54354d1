"""Measured figures of this machine: what is saved is read, and what cannot be read is no calibration."""

import pytest

from thinpipe.core.state_folder import STATE_FOLDER_VARIABLE
from thinpipe.planning.calibration import (
    Calibration,
    calibration_path,
    device_key,
    load_calibrations,
    save_calibration,
)

CARD = Calibration(
    overhead_nbytes=512_000_000,
    fragmentation_share=0.06,
    activation_factor=1.04,
    flops={"fp32": 9e12, "bf16-mixed": 2.1e13},
    to_device_bytes_per_second=11.5e9,
    to_host_bytes_per_second=12.1e9,
    attention="math",
    torch="2.13.0+cu130",
)


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(STATE_FOLDER_VARIABLE, str(tmp_path / "state"))


def test_every_figure_comes_back_and_other_devices_stay():
    key, other = device_key("cuda", "NVIDIA GeForce RTX 3060"), device_key("cpu", "Laptop")
    save_calibration(other, Calibration(overhead_nbytes=3))
    save_calibration(key, Calibration())
    assert save_calibration(key, CARD) == calibration_path()
    assert load_calibrations() == {other: Calibration(overhead_nbytes=3), key: CARD}


def test_without_a_file_there_are_none():
    assert load_calibrations() == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 1, "devices": {"cpu: x": {"flops": {"fp32": -1}}}}',
        '{"format": 1, "devices": {"cpu: x": {"fragmentation_share": 1}}}',
        '{"format": 2, "devices": {"cpu: x": {"overhead_nbytes": 1}}}',
    ],
)
def test_a_damaged_or_newer_file_is_ignored_with_a_warning(text, caplog):
    calibration_path().parent.mkdir(parents=True, exist_ok=True)
    calibration_path().write_text(text)
    assert load_calibrations() == {}
    assert "calibration.json is ignored" in caplog.text
