"""Every public entry computes on the device `sim` what it computes on the CPU, in every bit: `sim` has the CPU's
kernels. And again where creating a float64 tensor on the device raises."""

from dataclasses import fields

import pytest

import thinpipe
from tests.device.entries import ENTRIES
from thinpipe.cli.commands import VERBS
from thinpipe.models import kv_cache


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_computes_as_on_the_cpu(entry, sim, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_cache, "MAX_FLOAT32_ATTENTION_TOKENS", 0)  # bfloat16 attention on the CPU too

    def run(device, name):
        (tmp_path / name).mkdir()
        return entry.run(device, tmp_path / name)

    expected = run("cpu", "cpu")
    assert sim.counts()["kernels"] == 0
    assert run("sim", "sim") == expected
    assert sim.counts()["kernels"] > 0
    sim.set_float64(False)
    assert run("sim", "no-float64") == expected


ON_DEVICE = {"Codec", "codec", "CompressedSequential", "CompressedStage", "load", "LoadedModel", "Run", "train"}
"""Public names that compute on a device: in the list of entries, or in runs of several processes."""
ON_HOST = {"Losses", "Plan", "RunFailedError", "UserError", "plan", "tokenize", "Saved", "Started", "Step", "Stopped"}
ON_HOST |= {"Validated", "RunConfig", "BoundaryConfig", "CompressionConfig"}
FOR_COMPRESSORS = {"Compressor", "MessageContext", "MessageShape", "pack_bits", "register_compressor", "unpack_bits"}
"""What compressors are made of: those of the package use it."""


def test_every_public_name_was_asked_whether_it_computes_on_a_device():
    assert {*thinpipe.__all__} == ON_DEVICE | ON_HOST | FOR_COMPRESSORS


def test_every_command_with_a_device_is_run_on_it():
    """`join` and `train` in several processes are in the tests of runs, `selftest` in `test_selftest.py`; `service`
    hands its device to `join`."""
    named = {verb for verb, command in VERBS.items() if "device" in {field.name for field in fields(command.config)}}
    assert named == {"doctor", "eval", "generate", "join", "selftest", "service"}
