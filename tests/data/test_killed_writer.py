"""SIGKILL while tokens are written or overwritten: what opens afterwards is whole, and is the old or the new."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from thinpipe.data import DataError, ShardWriter, Tokens, Vocabulary
from thinpipe.data.shards import remove_tokens

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")

WRITER = """
import os, signal, sys
from pathlib import Path
from tests.data.test_killed_writer import write

def dying(function, budget=[int(sys.argv[2])]):
    def call(*args, **kwargs):
        budget[0] -= 1
        if budget[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

os.fsync, os.replace, os.unlink = dying(os.fsync), dying(os.replace), dying(os.unlink)
print("ready", flush=True)
write(Path(sys.argv[1]), "new")
while sys.argv[2] == "-1":
    write(Path(sys.argv[1]), "old")
    write(Path(sys.argv[1]), "new")
"""

State = Literal["old", "new", "nothing"]


def content(which: str) -> np.ndarray:
    seed, count = (1, 900) if which == "old" else (2, 1100)
    return np.random.default_rng(seed).integers(1, 500, count).astype(np.uint32)


def write(folder: Path, which: str) -> None:
    """Overwrites: several files, of which the last is not full."""
    if folder.exists():
        remove_tokens(folder)
    vocabulary = Vocabulary(size=500, end_of_text_id=0, tokenizer_sha256="0" * 64)
    with ShardWriter(folder, vocabulary, source=which, max_shard_tokens=200) as writer:
        for document in np.array_split(content(which), 20):
            writer.add(document, text_nbytes=len(document))
        writer.finish()


def state_of(folder: Path) -> State:
    """Fails when there is anything that opens but is neither the whole old nor the whole new content."""
    if not (folder / "manifest.json").exists():
        with pytest.raises(DataError, match="no finished tokens"):
            Tokens(folder)
        return "nothing"
    tokens = Tokens(folder)
    tokens.verify()
    which: State = "old" if tokens.manifest.source == "old" else "new"
    expected = [token for document in np.array_split(content(which), 20) for token in (*document.tolist(), 0)]
    assert tokens.read(0, len(tokens)).tolist() == expected
    return which


def start(folder: Path, dies_at_call: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(dies_at_call)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_killed_at_every_call_that_touches_the_disk(tmp_path: Path) -> None:
    states: list[State] = []
    for call in range(1, 100):
        folder = tmp_path / str(call)
        write(folder, "old")
        with start(folder, call) as process:
            status = process.wait(timeout=600)
        states.append(state_of(folder))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    # First the old one, then nothing, then the new one; and killing the writer never kept the next one from working.
    assert states == sorted(states, key=["old", "nothing", "new"].index)
    assert set(states) == {"old", "nothing", "new"}
    assert len(states) > 20
    write(folder := tmp_path / str(len(states) // 2), "new")
    assert state_of(folder) == "new"
    assert not list(folder.glob(".*"))


def test_killed_at_random_moments(tmp_path: Path) -> None:
    folder, draw = tmp_path / "tokens", random.Random(0)
    for _ in range(8):
        with start(folder, -1) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.0, 0.1))
            process.kill()
            assert process.wait(timeout=600) == -signal.SIGKILL
        state_of(folder)
