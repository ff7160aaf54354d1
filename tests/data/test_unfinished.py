"""Tokenizing with any number of processes, and killed and gone on with at any moment, gives the same bytes; what was
done is not done again, and not gone on with if it would be something else."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_tokenizers import make_tokenizer
from tests.data.conftest import random_text
from thinpipe.data import DataError, TokenizeConfig, Tokenizer, Tokens, prepare
from thinpipe.data.journal import JOURNAL_NAME

PREPARE = sys.modules["thinpipe.data.prepare"]
"""The module: its name in the package is that of the function."""
BLOCK_CHARS = 1500
"""Instead of half a million, so that a small text has many blocks."""

PROGRAM = """
import json, sys, time
from pathlib import Path
from thinpipe.data import TokenizeConfig, blocks, prepare

module = sys.modules["thinpipe.data.prepare"]  # of whose names one is a function of the package

blocks.BLOCK_CHARS, module.JOURNAL_SECONDS = {block_chars}, 0.0
write_block = module.write_block

def slowly(*args):
    time.sleep({pause})
    write_block(*args)

module.write_block = slowly
given = json.loads(sys.argv[1])
paths = {{name: Path(given.pop(name)) for name in ("output", "tokenizer") if name in given}}
for name in ("sources", "validation_sources"):
    given[name] = tuple(given.get(name, ()))
prepared = prepare(TokenizeConfig(**given, **paths))
print("finished", prepared.resumed_nbytes)
"""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpipe.data.blocks.BLOCK_CHARS", BLOCK_CHARS)
    monkeypatch.setattr(PREPARE, "JOURNAL_SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Documents of all lengths, from one word to several pieces and blocks."""
    tokenizer.save(tmp_path / "given")
    draw, path = random.Random(1), tmp_path / "corpus.jsonl"
    words = [draw.choice((1, 10, 100, 300)) for _ in range(120)] + [9000]
    path.write_text("".join(json.dumps({"text": random_text(count, seed)}) + "\n" for seed, count in enumerate(words)))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Chats, of which some have nothing to train on."""
    make_tokenizer(tmp_path / "chat-tokenizer", "chatml")
    path = tmp_path / "chats.jsonl"
    records = []
    for seed in range(40):
        answer = {"role": "assistant", "content": random_text(30 + seed, seed)}
        question = {"role": "user", "content": random_text(20, 100 + seed)}
        records.append({"messages": [question] if seed % 7 == 0 else [question, answer]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(source: Path, output: str, **changes: Any) -> dict[str, Any]:
    folder = source.parent
    kind: dict[str, Any] = {"tokenizer": str(folder / "given")}
    if source.name == "chats.jsonl":
        kind = {"tokenizer": str(folder / "chat-tokenizer"), "chat": True, "seq_len": 100}
    given = {"sources": [str(source)], "output": str(folder / output), "validation_fraction": 0.2}
    return {**given, "max_shard_tokens": 3000, **kind, **changes}


def config_of(given: dict[str, Any]) -> TokenizeConfig:
    paths = {name: Path(given[name]) for name in ("output", "tokenizer") if name in given}
    return TokenizeConfig(**{**given, **paths, "sources": tuple(given["sources"])})


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock. A manifest says where the text came from, not where the tokens are."""
    for side in ("train", "validation"):
        Tokens(folder / side).verify()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize(("source", "numbers"), [("corpus", (1, 2, 3)), ("chats", (1, 2))])
@pytest.mark.usefixtures("small_blocks")
def test_any_number_of_processes_gives_the_same_bytes(
    source: str, numbers: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    made = {}
    for workers in numbers:
        prepared = prepare(config_of(settings(path, f"by-{workers}", workers=workers)))
        made[workers] = content(path.parent / f"by-{workers}")
        assert prepared.resumed_nbytes == 0
    assert all(found == made[1] for found in made.values())
    assert len(made[1]) > 5
    if source == "chats":
        assert sum(sum(counts.dropped.values()) for counts in prepared.chats.values()) == 6


def test_the_blocks_change_no_token(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(config_of(settings(corpus, "one-block")))
    monkeypatch.setattr("thinpipe.data.blocks.BLOCK_CHARS", BLOCK_CHARS)
    prepare(config_of(settings(corpus, "many-blocks")))
    assert content(corpus.parent / "one-block") == content(corpus.parent / "many-blocks")


def start(given: dict[str, Any], *, pause: float = 0.0) -> subprocess.Popen[str]:
    code = PROGRAM.format(block_chars=BLOCK_CHARS, pause=pause)
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def journal_of(given: dict[str, Any]) -> dict[str, Any]:
    path = Path(given["output"]) / JOURNAL_NAME
    return json.loads(path.read_bytes()) if path.is_file() else {"blocks": 0}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize(("source", "lives"), [("corpus", 5), ("chats", 1)])
@pytest.mark.usefixtures("small_blocks")
def test_killed_at_random_moments(source: str, lives: int, request: pytest.FixtureRequest) -> None:
    path, draw = request.getfixturevalue(source), random.Random(2)
    whole, given = settings(path, "whole"), settings(path, "killed", workers=2)
    prepare(config_of(whole))
    reached = [0]
    for _ in range(lives):
        with start(given, pause=0.02) as process:
            target = reached[-1] + draw.randint(1, 4)
            wait_for(lambda: journal_of(given)["blocks"] >= target or process.poll() is not None)  # noqa: B023
            time.sleep(draw.uniform(0.0, 0.05))
            process.kill()
            assert process.wait(timeout=600) == -signal.SIGKILL, process.stderr and process.stderr.read()
        reached.append(journal_of(given)["blocks"])
        assert reached[-1] >= target  # what a killed one had recorded is never lost
        with pytest.raises(DataError, match="no finished tokens"):
            Tokens(Path(given["output"]) / "train")
    done = sum(state["text_nbytes"] for state in journal_of(given)["sides"].values())
    assert done > 0
    prepared = prepare(config_of(given))
    assert prepared.resumed_nbytes == done
    assert content(Path(given["output"])) == content(Path(whole["output"]))
    with pytest.raises(DataError, match="already holds finished tokens"):
        prepare(config_of(given))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.usefixtures("small_blocks")
def test_the_processes_of_a_killed_program_end(corpus: Path) -> None:
    import psutil

    given = settings(corpus, "killed", workers=2)
    with start(given, pause=0.05) as process:
        wait_for(lambda: journal_of(given)["blocks"] >= 2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(timeout=600)
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=60)[1] == []


def interrupt(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Leaves tokens of so many blocks."""
    from thinpipe.data.blocks import write_block

    written = []

    def write(*args: Any) -> None:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(args)
        write_block(*args)

    with monkeypatch.context() as patch:
        patch.setattr(PREPARE, "write_block", write)
        with pytest.raises(KeyboardInterrupt):
            prepare(config_of(given))
    assert journal_of(given)["blocks"] == after


@pytest.mark.usefixtures("small_blocks")
def test_a_tokenizer_is_not_trained_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in settings(corpus, "out", vocab_size=300).items() if name != "tokenizer"}
    prepare(config_of({**given, "output": str(corpus.parent / "whole")}))
    interrupt(given, monkeypatch, after=4)
    monkeypatch.setattr(Tokenizer, "train", None)
    assert prepare(config_of(given)).resumed_nbytes > 0
    assert content(Path(given["output"])) == content(corpus.parent / "whole")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_shard_tokens": 2000}, "max_shard_tokens"),
        ({"validation_seed": 1}, "validation_seed"),
        ({"text_field": "body"}, "text_field"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_other_settings_are_noticed(
    corpus: Path, changes: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(corpus, "out")
    interrupt(given, monkeypatch, after=3)
    with pytest.raises(DataError, match=rf"unfinished tokens, and since they were begun {named} changed: go on with"):
        prepare(config_of({**given, **changes}))
    assert journal_of(given)["blocks"] == 3
    if "text_field" not in changes:
        prepare(config_of({**given, **changes, "overwrite": True}))
        prepare(config_of({**settings(corpus, "whole"), **changes}))
        assert content(corpus.parent / "out") == content(corpus.parent / "whole")


@pytest.mark.usefixtures("small_blocks")
def test_other_processes_and_overwrite_are_no_change(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(corpus, "out", workers=1)
    interrupt(given, monkeypatch, after=3)
    assert prepare(config_of({**given, "workers": 3, "overwrite": True})).resumed_nbytes > 0
    prepare(config_of(settings(corpus, "whole")))
    assert content(corpus.parent / "out") == content(corpus.parent / "whole")


@pytest.mark.usefixtures("small_blocks")
def test_changed_sources_are_noticed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, status = settings(corpus, "out"), corpus.stat()
    interrupt(given, monkeypatch, after=3)
    text = corpus.read_text()
    corpus.write_text(text + '{"text": "more"}\n')
    with pytest.raises(DataError, match=rf"since they were begun the file {corpus} changed"):
        prepare(config_of(given))
    first = text.index('"text": "') + len('"text": "')
    corpus.write_text(text[:first] + "#" + text[first + 1 :])
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))  # neither size nor time, as a data set may change
    with pytest.raises(DataError, match=r"unfinished tokens of a text that has changed since: remove that folder"):
        prepare(config_of(given))


@pytest.mark.usefixtures("small_blocks")
def test_lost_shards_are_noticed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(corpus, "out", max_shard_tokens=1000)
    interrupt(given, monkeypatch, after=6)
    shard = max((corpus.parent / "out" / "train").glob("shard-*.bin"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(DataError, match=rf"{shard.name} has (lost tokens|changed) since it was written: remove"):
        prepare(config_of(given))
    shard.write_bytes(data)
    (corpus.parent / "out" / "train" / "shard-00000.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00000.bin has changed since it was written: remove"):
        prepare(config_of(given))
    (corpus.parent / "out" / JOURNAL_NAME).write_bytes(b"{")
    with pytest.raises(DataError, match=r"unfinished.json is damaged .*: remove it to begin anew"):
        prepare(config_of(given))


@pytest.mark.usefixtures("small_blocks")
def test_two_at_once_are_refused(corpus: Path) -> None:
    given = settings(corpus, "out")
    with start(given, pause=0.2) as process:
        wait_for(lambda: journal_of(given)["blocks"] >= 1)
        with pytest.raises(Exception, match="is in use by another `thinpipe tokenize`: wait until it ends"):
            prepare(config_of(given))
        process.kill()
        process.wait(timeout=600)


@pytest.mark.usefixtures("small_blocks")
def test_an_error_in_a_chat_reaches_whoever_asked(chats: Path) -> None:
    chats.write_text(chats.read_text() + '{"messages": 3}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl, line 41"):
        prepare(config_of(settings(chats, "out", workers=2)))


def test_a_process_that_is_killed_is_said(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpipe.data.blocks.BLOCK_CHARS", BLOCK_CHARS)
    monkeypatch.setattr("thinpipe.data.encoding_processes._WORKER", "thinpipe.nothing")
    with pytest.raises(
        DataError, match=r"a process that tokenizes has ended \(exit code \d+\): the same command goes on"
    ):
        prepare(config_of(settings(corpus, "out")))
