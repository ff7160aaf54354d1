"""Identifiers use the field's words, and the scan that says so finds those that do not."""

import pytest

from tests.vocabulary import search


def test_no_identifier_uses_an_old_word():
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
    (tree / "src" / "module.py").write_text("line = memory = 1\ntext = 'a spare part is told'\n")
    assert list(search(tree)) == []


def test_an_ordinary_sense_is_one_of_its_file(tree):
    folder = tree / "src" / "thinpipe" / "swarm" / "protocol"
    folder.mkdir(parents=True)
    for name in ("decoding.py", "other.py"):
        (folder / name).write_text("letter = 1")
    assert [found.path.name for found in search(tree)] == ["other.py"]
