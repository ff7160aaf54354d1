"""Every command block and program of the pages is run by a test, or its mark says why it is not.

A mark is a comment on the line before the block:

    NAME: tests/readme runs these           a test reads the block by NAME and runs it
    NAME output: tests/readme compares it   what the commands before print
    file NAME                               a file that the reader saves; a test uses it
    run by FILE::TEST, with what is other   the test has the same commands in its own words
    not run: REASON
"""

import re

import pytest

from tests.readme.pages import ROOT, blocks, commands, guides

PROGRAMS = (
    "apt-get", "bash", "brew", "cd", "curl", "docker", "git", "hf", "pip", "podman", "python", "python3", "ssh",
    "systemctl", "thinpipe", "torchrun", "uv", "winget",
)  # fmt: skip
MADE = ROOT / "docs/reference/api.md"
"""Its blocks are signatures."""
PAGES = [page for page in guides() if page != MADE]
_RUN = re.compile(r"(?P<name>.+): tests/readme runs these|(?P<output>.+ output): tests/readme compares it")
_BY = re.compile(r"run by (?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)(?:, [a-z].+)?")
_NOT = re.compile(r"not run: [\w`].{10,}")


def does_something(block):
    first_words = {line.split()[0] for line in block.text.splitlines() if line.strip() and not line.startswith(" ")}
    return block.language == "python" or (block.language != "toml" and bool(first_words & set(PROGRAMS)))


def fault(mark, tests):
    """What is wrong with a mark; `tests`: path -> text of all tests."""
    if found := _RUN.fullmatch(mark):
        name = found["name"] or found["output"]
        return "" if any(f'"{name}"' in text for text in tests.values()) else f"no test reads {name!r}"
    if found := _BY.fullmatch(mark):
        return "" if f"def {found['test']}(" in tests.get(found["file"], "") else f"there is no {found[0]}"
    if mark.startswith("file "):
        name = mark.removeprefix("file ")
        return "" if any("save_files(" in text for text in tests.values()) and name else "no test saves it"
    return "" if _NOT.fullmatch(mark) else f"what is the mark {mark!r}?"


@pytest.fixture(scope="module")
def tests():
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_accounted_for(page, tests):
    faults = [f"{block.text.splitlines()[0]}: {fault(block.mark, tests)}" for block in blocks(page)
              if does_something(block) and fault(block.mark, tests)]  # fmt: skip
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_is_outside_of_these_blocks(page):
    """A fence that the pattern of `blocks` does not see, as one that is indented, would hide commands."""
    lines = sum(line.lstrip().startswith("```") for line in page.read_text(encoding="utf-8").splitlines())
    assert lines == 2 * len(blocks(page))


def test_there_are_many():
    found = [block for page in PAGES for block in blocks(page) if does_something(block)]
    assert len(found) > 45
    assert len([block for block in found if block.mark.startswith("not run")]) < len(found) / 2
    assert sum(len(commands(page)) for page in PAGES) > 50


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("", "what is the mark"),
        ("not run:", "what is the mark"),
        ("nowhere: tests/readme runs these", "no test reads 'nowhere'"),
        ("run by tests/readme/test_blocks.py::test_that_is_missing", "there is no"),
        ("run by tests/missing.py::test_there_are_many", "there is no"),
    ],
)
def test_such_a_mark_would_be_found(mark, said):
    assert fault(mark, {"tests/readme/test_blocks.py": "def test_there_are_many():"}).startswith(said)


def test_good_marks():
    tests = {"tests/a.py": 'def test_b():\n    follow(page, "friends")'}
    marks = (
        "friends: tests/readme runs these",
        "run by tests/a.py::test_b, in another folder",
        "not run: needs a card here",
    )
    assert not any(fault(mark, tests) for mark in marks)
