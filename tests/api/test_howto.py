"""The programs of docs/howto/own-code.md."""

import re
import subprocess
import sys

import pytest
import torch

import thinpipe
from tests.readme.pages import ROOT, blocks, read, save_files

PAGE = ROOT / "docs/howto/own-code.md"


@pytest.mark.timeout(600)
def test_a_pipeline_of_ones_own_learns_with_the_bytes_that_the_page_states(tmp_path):
    save_files(PAGE, tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, "two_stages.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+), 2176 bytes a message", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert "`2176 bytes a message`: 4 samples of 16 tokens, 16,384 bytes in float32" in read(PAGE)


def test_a_codec_as_the_page_uses_it():
    (program,) = (block.text for block in blocks(PAGE) if "thinpipe.codec(" in block.text)
    names = {"thinpipe": thinpipe, "torch": torch}
    exec(program, names)
    assert names["message"].shape == (names["codec"].nbytes,)
    assert names["close_to_tensor"].shape == (4, 16, 64)


def test_training_as_the_page_does_it(tmp_path, monkeypatch):
    (program,) = (block.text for block in blocks(PAGE) if "thinpipe.tokenize" in block.text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-texts").mkdir()
    for number in range(40):
        text = f"Once upon a time there were {number} little words, and they lived in a small file. " * 100
        (tmp_path / f"my-texts/{number}.txt").write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names = {}
    fewer = 'training={"steps": 3}, lr_scheduler={"warmup_steps": 1}, callbacks'
    exec(program.replace("4096", "290").replace("callbacks", fewer), names)
    assert names["run"].stop_reason == "finished"
    assert names["steps"] == [1, 2, 3]
