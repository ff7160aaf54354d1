"""Names and messages use the field's words, and the scan that says so finds those that do not."""

import re

import pytest

from tests.vocabulary import ROOT, messages, search
from tests.vocabulary.sources import files_in, messages_of


def test_no_name_and_no_message_uses_an_old_word():
    assert [str(found) for found in search()] == []


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "src").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("class Roster: ...", "Roster"),
        ("def line_test(): ...", "line_test"),
        ("most_bytes = 1", "most_bytes"),
        ("call(spares=1)", "spares"),
        ("thing.hosted", "hosted"),
        ('EVENT = "told"', "told"),
        ("from thinpipe.swarm import gate", "gate"),
        ("import thinpipe as keeper", "keeper"),
        ("class RunSection: ...", "RunSection"),
    ],
)
def test_the_scan_sees_an_old_word(tree, source, name):
    (tree / "src" / "module.py").write_text(source)
    assert [found.text for found in search(tree)] == [name]


def test_the_scan_sees_the_name_of_a_module(tree):
    (tree / "src" / "mailroom.py").touch()
    assert [found.text for found in search(tree)] == ["mailroom"]


def test_ordinary_words_are_free(tree):
    (tree / "src" / "module.py").write_text("line = memory = 1\ntext = 'a line of text, at most 3 in memory'\n")
    assert list(search(tree)) == []


def test_an_ordinary_sense_is_one_of_its_file(tree):
    folder = tree / "src" / "thinpipe" / "core"
    folder.mkdir(parents=True)
    for name in ("foreign.py", "other.py"):
        (folder / name).write_text("letter = 1")
    assert [found.path.name for found in search(tree)] == ["other.py"]


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('raise ValueError("make room")', "make room"),
        ('print(f"{name} is a spare")', "spare"),
        ('print(f"bytes of {name}, both {0} ways", "both ways")', "both ways"),
        ('"""Sends what the peer\nwas told."""', "told"),
        ('class Hub:\n    peers = 1\n    """Peers of an epoch."""', "epoch"),
        ("x = 1  # nothing was heard of it", "heard"),
        ('help = "the line to the hub"', "the line to"),
    ],
)
def test_the_scan_reads_messages_docstrings_and_comments(tree, source, phrase):
    (tree / "src" / "module.py").write_text(source)
    assert [found.word for found in search(tree)] == [phrase]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("src/preset.toml", "# bytes both ways\n[hub]\nspare_peers = 1\n", ["spare", "both ways"]),
        ("src/page.html", "<p id='a' class=\"peer-roster\">nothing heard</p>", ["roster", "heard"]),
        ("src/page.html", '<script>\nconst ballot = "one"; // told\n</script>', ["ballot", "told"]),
        (
            "docs/howto/page.md",
            "The hub's\nline is slow.\n\n```\nits line\n```\n\nEach way.\n",
            ["hub's line", "Each way"],
        ),
        ("docs/log.md", "The hub's line was slow.", []),
        ("examples/hub.service", "# a spare peer\n[Service]\n", ["spare"]),
    ],
)
def test_the_scan_reads_settings_pages_and_documentation(tree, file, content, words):
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(content)
    assert list(dict.fromkeys(found.word for found in search(tree))) == words


def test_an_exception_is_of_its_file_and_phrase(tree):
    for file in ("docs/science.md", "docs/other.md"):
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text("Two epochs, and a spare.")
    found = [(found.path.name, found.word) for found in search(tree)]
    assert found == [("other.md", "epochs"), ("other.md", "spare"), ("science.md", "spare")]


def test_every_exception_is_used():
    """An exception that nothing needs any more would hide the next mistake."""
    for files, phrase, _ in messages.EXCEPTIONS:
        used = (
            re.search(rf"\b(?:{phrase})\b", " ".join(text.split()), re.IGNORECASE)
            for path in files_in(ROOT)
            if re.fullmatch(files, path.relative_to(ROOT).as_posix())
            for _, text in messages_of(path)
        )
        assert any(used), (files, phrase)
