"""docs/howto/train-with-friends.md: its file is the example's, and its commands are commands."""

import shlex
import tomllib
from pathlib import Path

import pytest

from thinpipe.cli import _parse
from thinpipe.train.hub_config import HubConfig

ROOT = Path(__file__).parents[2]


def blocks(language):
    """The fenced blocks of a language, in order; "" for those of none."""
    found, inside = [], None
    for line in (ROOT / "docs/howto/train-with-friends.md").read_text().splitlines():
        if not line.startswith("```"):
            if inside is not None:
                inside[1].append(line)
        elif inside is None:
            inside = (line.removeprefix("```"), [])
        else:
            found.append(inside)
            inside = None
    return ["\n".join(lines) for kind, lines in found if kind == language]


COMMANDS = [line for block in blocks("") for line in block.splitlines() if line.startswith("thinpipe ")]


def test_the_run_file_is_the_example():
    (toml,) = blocks("toml")
    assert tomllib.loads(toml) == tomllib.loads((ROOT / "examples/friends.toml").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "friends.toml").write_text(blocks("toml")[0])
    _parse(shlex.split(command)[1:])


def test_the_hub_does_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "friends.toml").write_text(blocks("toml")[0])
    (hub,) = (command for command in COMMANDS if command.startswith("thinpipe hub"))
    _, config = _parse(shlex.split(hub)[1:])
    assert isinstance(config, HubConfig)
    assert config.hub.peers == len(config.model.boundaries) + 1
    assert config.microbatches >= config.hub.peers
