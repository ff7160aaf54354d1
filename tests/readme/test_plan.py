"""The plans of README and how-to are asked for as they stand, and README shows what is really answered."""

import re

import pytest

from tests.readme.pages import ROOT, blocks, marked
from thinpipe.cli import main

PAGES = (ROOT / "README.md", ROOT / "docs/howto/plan.md")


@pytest.fixture
def in_a_clone(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("in_a_clone")
def test_every_plan_is_answered(page, capsys):
    for program, *arguments in marked(page, "plan"):
        assert program == "thinpipe"
        assert main(arguments) == 0
        assert "tokens/s" in capsys.readouterr().out


@pytest.mark.usefixtures("in_a_clone")
def test_readme_shows_what_is_answered(capsys):
    (_, *arguments), *_ = marked(ROOT / "README.md", "plan")
    main(arguments)
    said = capsys.readouterr().out
    shown = next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("llama-1b: "))
    assert _words(shown) == _words(said)


def _words(text: str) -> list[str]:
    """Whatever the width of the terminal."""
    return re.sub("─+", "", text).split()
