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
    losses = run(tmp_path, "two_stages.py", r"loss ([\d.]+), 2176 bytes a message")
    assert losses[-1] < losses[0]
    assert "`2176 bytes a message`: 4 samples of 16 tokens, 16,384 bytes in float32" in read(PAGE)


@pytest.mark.timeout(600)
def test_send_and_receive_as_the_page_has_it(tmp_path):
    losses = run(tmp_path, "send_and_receive.py", r"loss ([\d.]+), 4352 bytes forward, 8448 back")
    assert losses[-1] < losses[0]
    assert "`4352 bytes forward, 8448 back`, of 32,768 in float32" in read(PAGE)


def run(folder, program, line):
    """The numbers of the lines that a program of the page prints in two processes."""
    save_files(PAGE, folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, program], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = [float(number) for number in re.findall(line, done.stdout)]
    assert len(found) == 20
    return found


def test_the_boundary_of_two_directions_as_the_page_has_it():
    (program,) = (block.text for block in blocks(PAGE) if "boundary = thinpipe.BoundaryConfig(" in block.text)
    names = {"thinpipe": thinpipe}
    exec(program, names)
    stages = [torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)]
    twin = thinpipe.CompressedSequential(stages, shape=(4, 16, 64), boundary=names["boundary"])
    assert (twin.forward_nbytes, twin.backward_nbytes) == (2560, 1328)


def test_a_codec_as_the_page_uses_it(capsys):
    (program,) = (block.text for block in blocks(PAGE) if "close_to_tensor" in block.text)
    torch.manual_seed(0)
    exec(program, {})
    printed = capsys.readouterr().out.strip()
    assert f"It prints `{printed}`." in read(PAGE)


def test_bytes_and_errors_of_codecs_as_the_page_states_them():
    tensor = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))
    rows = re.findall(r'^\| `("[^`]*)` \| (\d+) \| ([\d.]+) \|$', read(PAGE), re.MULTILINE)
    assert len(rows) == 9
    for arguments, nbytes, stated in rows:
        codec = eval(f"codec({arguments}, shape=(4, 16, 64))", {"codec": thinpipe.codec})
        error = ((codec.decode(codec.encode(tensor)) - tensor).norm() / tensor.norm()).item()
        assert (codec.nbytes, round(error, len(stated.partition(".")[2]))) == (int(nbytes), float(stated))


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
