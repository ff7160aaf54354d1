"""The recording of `thinpipe up`: the picture is drawn from it, and it shows what its title says."""

import json
import xml.etree.ElementTree as ET

import pytest

from tests.readme.pages import ROOT, program

FOLDER = ROOT / "docs/recording"


@pytest.fixture(scope="module")
def draw():
    with program(FOLDER / "draw.py") as module:
        yield module


def cast(*screens):
    head = {"version": 2, "width": 20, "height": 2, "title": "a <test>"}
    lines = [head, *([number * 5, "o", "\x1b[H\x1b[2J" + screen] for number, screen in enumerate(screens))]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_screen_becomes_text_with_its_colours(draw):
    svg = draw.svg_of(cast("$ a & b\r\n\x1b[1;31mred\x1b[0m plain \x1b[38;5;196mmore\x1b[39m"))
    root = ET.fromstring(svg)
    texts = {found.text: found.attrib for found in root.iter("{http://www.w3.org/2000/svg}text")}
    assert set(texts) == {"$ a & b", "red", " plain ", "more"}
    assert (texts["red"]["class"], texts["red"]["style"]) == ("b", "fill:#e06c75")
    assert (texts["more"]["x"], texts["more"]["style"]) == (str(10 * draw.CELL_WIDTH), "fill:#ff0000")
    assert root.attrib["aria-label"] == "a <test>"


def test_rows_that_return_are_drawn_once_and_long_frames_are_shortened(draw):
    svg = draw.svg_of(cast("same\r\none", "same\r\ntwo", "same\r\none"))
    assert svg.count("same</text>") == svg.count("one</text>") == 1
    assert f"film {2 * draw.LONGEST_SECONDS + draw.LAST_SECONDS:.1f}s" in svg


def test_the_picture_is_that_of_the_recording(draw):
    recorded = (FOLDER / "up.cast").read_text(encoding="utf-8")
    assert (FOLDER / "up.svg").read_text(encoding="utf-8") == draw.svg_of(recorded), (
        "run: docs/recording/make.py --draw"
    )


def test_it_shows_a_peer_that_is_killed_and_comes_back():
    head, *events = map(json.loads, (FOLDER / "up.cast").read_text(encoding="utf-8").splitlines())
    assert head["version"] == 2
    assert [seconds for seconds, *_ in events] == sorted(seconds for seconds, *_ in events)
    shown = [text for *_, text in events]
    wanted = iter(
        ["pkill -9", "ended by SIGKILL", "thinpipe join", "generation 2", "finished: the trained model is in"]
    )
    wish = next(wanted)
    for text in shown:
        while wish and wish in text:
            wish = next(wanted, "")
    assert not wish, f"never shown after the others: {wish}"
