"""The README's commands, as they stand there, in an empty folder; then the result in `transformers`."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reference.exported import assert_same_in_transformers
from thinpipe.core.events import Validated, read_events

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300


def quick_start_commands():
    block = re.search(r"<!-- quick start.*?-->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [shlex.split(line) for line in block[1].strip().splitlines()]


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick-start")
    (folder / "examples").symlink_to(ROOT / "examples")
    printed, started = {}, time.monotonic()
    for command in quick_start_commands():
        assert command[0] == "thinpipe"
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed[command[1]] = done.stdout
    seconds = time.monotonic() - started
    print(f"the quick start took {seconds:.0f} s")
    return folder, printed, seconds


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_the_quick_start_runs_in_five_minutes_and_learns(quick_start):
    folder, printed, seconds = quick_start
    assert seconds < LIMIT_SECONDS
    losses = [
        event.loss for event in read_events(folder / "runs/quickstart/events.jsonl") if isinstance(event, Validated)
    ]
    assert losses[-1] < losses[0] < 7.6  # ln 2048, what guessing costs
    assert losses[-1] < 6.0
    assert (folder / "runs/quickstart/loss.png").stat().st_size > 10_000
    assert printed["generate"].startswith("Alice looked at the Queen")
    assert len(printed["generate"]) > 100


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_the_export_opens_in_transformers_with_the_same_logits_and_text(quick_start):
    folder, _, _ = quick_start
    assert_same_in_transformers(folder / "exported", folder / "runs/quickstart", "Alice looked at the Queen and")
    assert "thinpipe" in (folder / "exported/README.md").read_text()
