"""examples/*.py do what they say, in a few steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_a_boundary_method_of_ones_own_sends_the_bytes_that_it_states_and_learns():
    printed = run("custom_boundary.py", "8")
    found = re.findall(r"^(\w+): (\d+) bytes a token, validation loss ([\d.]+)$", printed, re.MULTILINE)
    assert [(name, int(nbytes)) for name, nbytes, _ in found] == [("bf16", 128 * 4 + 2), ("signs", 2 * (16 + 2) + 2)]
    assert all(float(loss) < 7.6 for *_, loss in found)  # ln 2048, what guessing costs


@pytest.mark.timeout(900)
def test_the_python_api_trains_goes_on_and_writes(tmp_path):
    first = run("python_api.py", str(tmp_path), "4")
    second = run("python_api.py", str(tmp_path), "6")
    assert "finished: 4,096 tokens, validation loss" in first
    assert "finished: 6,144 tokens, validation loss" in second
    assert len(second[second.index("Alice looked at the Queen") :]) > 60


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))
