"""Every command of every page is understood by the real parser: a wrong verb, flag or value fails here. No torch."""

import re

import pytest

from tests.readme.pages import ROOT, blocks, commands, guides, prose, save_files
from thinpipe.cli import main
from thinpipe.cli.commands import VERBS
from thinpipe.cli.parsing import parse

COMMANDS = [
    pytest.param(page, words, id=f"{page.relative_to(ROOT)}: {' '.join(words)}")
    for page in guides()
    for words in commands(page)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader is: beside the examples, with a run file, and one that `thinpipe new` has written."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("RUN.toml", "mine.toml"):
        (tmp_path / name).write_text((ROOT / "examples/friends.toml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_it_is_understood(page, words, folder):
    save_files(page, folder)
    parse(words)


def test_there_are_many():
    assert len(COMMANDS) > 30


@pytest.mark.usefixtures("folder")
def test_a_wrong_flag_would_be_found(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["train", "RUN.toml", "--training.stepps", "3"])
    assert stopped.value.code == 2
    assert "--training.steps" in capsys.readouterr().err


@pytest.mark.parametrize("page", guides(), ids=lambda page: str(page.relative_to(ROOT)))
def test_verbs_named_in_passing_exist(page):
    known = {name.split()[0] for name in VERBS}
    named = re.findall(r"`thinpipe\s+([a-z]+)", prose(page))
    assert not set(named) - known


@pytest.mark.usefixtures("folder")
def test_the_page_shows_what_plan_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "118")
    page = ROOT / "docs/howto/plan.md"
    (shown,) = (block.text for block in blocks(page) if block.mark.startswith("plan output"))
    plan = next(words for words in commands(page) if words[1] == "examples/friends-1b.toml")
    assert main(plan) == 0
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert not set(shown.splitlines()) - printed
