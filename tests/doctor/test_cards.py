"""A graphics card that torch cannot use is found by what its driver and the system leave on the disk."""

import json
import os

import pytest
import torch

from thinpipe.cli import main
from thinpipe.device.cards import AMD, NVIDIA, _fix, unused_card
from thinpipe.doctor.machine import _install_torch

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="torch sees a card here")
VERSION = torch.__version__.partition("+")[0]


@pytest.fixture
def no_driver(monkeypatch, tmp_path):
    """No program on the PATH, and no file below the folder, which is returned."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir()
    return tmp_path


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")


def pci(index, kind, maker):
    folder = f"sys/bus/pci/devices/0000:0{index}:00.0"
    return {f"{folder}/class": f"{kind}\n", f"{folder}/vendor": f"{maker}\n"}


MACHINES = {
    "gaming PC": ({**pci(0, "0x030000", "0x8086"), **pci(1, "0x030000", "0x10de")}, NVIDIA, "/cu130"),
    "server": (pci(1, "0x030200", "0x10de"), NVIDIA, "/cu130"),
    "two makers": ({**pci(0, "0x030000", "0x1002"), **pci(1, "0x030000", "0x10de")}, NVIDIA, "/cu130"),
    "Radeon": (pci(1, "0x038000", "0x1002"), AMD, "/rocm7.2"),
    "Windows": ({"Windows/System32/nvcuda.dll": ""}, NVIDIA, "/cu130"),
    "WSL": ({"usr/lib/wsl/lib/libcuda.so.1": ""}, NVIDIA, "/cu130"),
}
WITHOUT = {
    "nothing": {},
    "Intel graphics": pci(0, "0x030000", "0x8086"),
    "NVIDIA's sound": pci(1, "0x040300", "0x10de"),
    "unreadable": {"sys/bus/pci/devices/0000:01:00.0/class": "0x030000"},
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_card_is_found_with_the_line_that_installs_its_torch(no_driver, machine):
    files, maker, index = MACHINES[machine]
    write(no_driver, files)
    found = unused_card(no_driver)
    assert maker in found.text
    assert (
        f"pip install --force-reinstall torch=={VERSION} --index-url https://download.pytorch.org/whl{index}"
        in found.fix
    )


@pytest.mark.parametrize("machine", WITHOUT)
def test_what_is_no_card_for_torch_is_not_found(no_driver, machine):
    write(no_driver, WITHOUT[machine])
    assert unused_card(no_driver) is None


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
@pytest.mark.parametrize(("code", "state"), [(0, "warning"), (9, "ok")])
def test_the_doctor_asks_the_driver(no_driver, capsys, code, state):
    """Code 9 is what NVIDIA's program ends with where its driver is not loaded."""
    program = no_driver / "programs/nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA GeForce RTX 3060'\nexit {code}\n", encoding="ascii")
    program.chmod(0o755)
    assert main(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}["devices"]
    assert found["state"] == state
    assert ("NVIDIA GeForce RTX 3060" in found["text"], "/whl/cu130" in found["fix"]) == (code == 0, code == 0)


def test_what_no_install_line_mends_is_said():
    assert "no torch.distributed" in _fix(AMD, "2.13.0", "win32")
    assert "update the driver" in _fix(NVIDIA, "2.13.0+cu130", "win32")
    assert "update the driver" in _fix(AMD, "2.13.0+rocm7.2", "linux")
    assert "Intel Mac cannot" in _install_torch("darwin", "x86_64")
    for system, processor in (("darwin", "arm64"), ("win32", "AMD64"), ("linux", "x86_64")):
        assert _install_torch(system, processor).startswith("Install it: pip install")
