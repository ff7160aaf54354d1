"""examples/*.py do what they say, in a few steps."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import thinpipe

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, launcher=()):
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_a_boundary_method_of_ones_own_sends_the_bytes_that_it_states_and_learns():
    printed = run("custom_boundary.py", "8")
    found = re.findall(r"^(\w+): (\d+) bytes a token and direction, validation loss ([\d.]+)$", printed, re.MULTILINE)
    assert [(name, int(nbytes)) for name, nbytes, _ in found] == [("bf16", 128 * 2), ("signs", 16 + 2)]
    assert all(float(loss) < 7.6 for *_, loss in found)  # ln 2048, what guessing costs


@pytest.mark.timeout(900)
def test_the_notebook_trains_goes_on_and_writes(tmp_path):
    first = run("notebook.py", str(tmp_path), "4")
    second = run("notebook.py", str(tmp_path), "6")
    assert "step 1: Step" in first
    assert "finished: 4 steps, validation loss" in first
    assert "step 4: Step" not in second
    assert "step 5: Step" in second
    assert "finished: 6 steps, validation loss" in second
    assert len(second[second.index("validation loss") :]) > 60


def test_in_a_notebook_the_arguments_of_the_kernel_are_not_ours(tmp_path, monkeypatch):
    given = {}

    def train(*_arguments, **settings):
        given.update(settings)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(thinpipe, "tokenize", lambda *_, **__: None)
    monkeypatch.setattr(thinpipe, "train", train)
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(EXAMPLES / "notebook.py"), run_name="__main__")
    assert (given["job"]["dump_folder"], given["training"]["steps"]) == (Path("runs/notebook/run"), 200)


@pytest.mark.timeout(900)
def test_a_model_of_ones_own_in_two_processes_equals_one():
    printed = run("own_model.py", "20", launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    losses = [float(found) for found in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    assert f"{8 * 16 * (64 // 2 + 2)} bytes a message, equal to one process: True" in printed


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))
    assert len((EXAMPLES / "notebook.py").read_text().splitlines()) <= 30
