"""The README's commands, as they stand there, in an empty folder; then the result in `transformers`."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from thinpipe.checkpoint import find_checkpoint, load_model
from thinpipe.core.events import Validated, read_events
from thinpipe.models.generate import generate

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
    transformers = pytest.importorskip("transformers")
    folder, _, _ = quick_start
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    ours = load_model(find_checkpoint(folder / "runs/quickstart"))
    ids = tokenizer("Alice looked at the Queen and", return_tensors="pt").input_ids
    with torch.no_grad():
        expected, got = ours(ids), theirs(ids).logits
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-4
    text = theirs.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
    stop_id = tokenizer.eos_token_id
    assert text == list(generate(ours, ids[0].tolist(), max_new_tokens=30, temperature=0.0, stop_id=stop_id))
    assert "thinpipe" in (folder / "exported/README.md").read_text()
