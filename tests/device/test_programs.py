"""Runs and programs on the device `sim`, which programs have from their environment."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.device import build as building
from tests.device.sim import environment
from tests.programs import steps_of
from tests.warm import run_warm
from thinpipe.training.trainer import Trainer

PROGRAM = """
import torch
torch.ones(3, device="sim:2").sum().item()
print(torch.accelerator.device_count(), torch.sim.counts()["kernels"])
try:
    torch.ones(1, device="sim", dtype=torch.float64)
except TypeError as error:
    print(error)
torch.empty(1000, device="sim")
"""


@pytest.mark.parametrize("warm", [True, False])
def test_a_program_has_the_device_from_its_environment(sim_library, tmp_path, warm):  # noqa: ARG001
    (tmp_path / "uses_sim.py").write_text(PROGRAM)
    variables = os.environ | environment(SIM_DEVICES=3, SIM_NO_F64=1, SIM_MEMORY_BYTES=2000)
    variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    if warm:
        done = run_warm("uses_sim", timeout=600, env=variables)
    else:
        command = [sys.executable, "-m", "uses_sim"]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("3 2\n"), done.stderr
    assert "doesn't support float64" in done.stdout
    assert "OutOfMemoryError: sim:0 out of memory" in done.stderr


def test_a_run_of_one_process_computes_as_on_the_cpu(sim, run_config, tmp_path):
    """Steps, basis updates, validation and checkpoints."""

    def run(device):
        job = replace(run_config.job, dump_folder=tmp_path / device)
        config = replace(run_config, job=job, training=replace(run_config.training, device=device))
        Trainer(config).train()
        return [(step.loss, step.grad_norm) for step in steps_of(config)]

    losses = run("sim")
    assert sim.counts()["kernels"] > 10_000
    assert len(losses) == 12
    assert losses == run("cpu")


def test_a_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(building.BuildError, match="there is no no-such-compiler: install g"):
        building.build()
