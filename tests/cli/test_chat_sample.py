"""The chat that is shown before anything is written: colour on a terminal, marks elsewhere, no codes of the data."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.data.chat_tokenizers import make_tokenizer
from thinpipe.cli import main
from thinpipe.cli.chat_sample import show_chat

PIECES = [("<|user|>Hi\n", False), ("Hello\x1b[2J.", True)]


def shown(**options: object) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=str(options.pop("encoding", "utf-8")))
    show_chat([*PIECES, ("é", True)], Console(file=file, **options))
    file.seek(0)
    return file.read()


def test_marks_where_there_is_no_colour() -> None:
    assert shown() == "The first chat. Trained on is {+this+}:\n<|user|>Hi\n{+Hello\\x1b[2J.+}{+é+}\n"
    assert "{+\\xe9+}" in shown(encoding="ascii")


def test_colour_on_a_terminal() -> None:
    text = shown(force_terminal=True, color_system="standard")
    assert "\x1b[30;42mHello\\x1b[2J." in text
    assert "{+" not in text
    assert "\x1b[2m<|user|>Hi" in text
    assert "\x1b[30;42mwhat looks like this" in text


def test_the_command_shows_a_chat_first_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path / "tokenizer", "chatml")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    records = [{"messages": turns[:1]}, {"messages": turns}, {"messages": [*turns, *turns]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    named = {"--tokenizer": "tokenizer", "--sources": "a.jsonl", "--output": "out"}
    given = [word for option, name in named.items() for word in (option, str(tmp_path / name))]
    assert main(["tokenize", "--chat", *given, "--seq-len", "30"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The first chat. Trained on is {+this+}:\n<|im_start|>user\nHi<|im_end|>\n")
    assert "{+Hello.<|im_end|>+}" in printed
    lines = printed.splitlines()
    assert any(line.startswith("  train: 2 chats, ") and "of them trained on (" in line for line in lines)
    assert "    1 were cut at seq_len" in lines
    assert "    1 left out: no turn of the assistant" in lines
