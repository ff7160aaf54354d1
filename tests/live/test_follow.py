"""A log that somebody else writes: before it is there, while it grows, with torn lines, and begun anew."""

import os
import subprocess
import sys
import time

import msgspec
import pytest

from tests.live.told import started, step
from thinpipe.core.events import EventLog
from thinpipe.core.tail import Tail
from thinpipe.live.follow import Following

WRITER = """
import sys
from pathlib import Path
from tests.live.told import started, step
from thinpipe.core.events import EventLog
with EventLog(Path(sys.argv[1])) as log:
    log.write(started())
    for number in range(1, 201):
        log.write(step(number))
"""


def test_a_file_that_another_process_writes(tmp_path):
    following = Following(tmp_path / "run")
    assert following.look() == []
    assert following.story.picture().state == "waiting"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), os.getcwd()])}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "run" / "events.jsonl"], env=environment)
    events, deadline = [], time.monotonic() + 120
    while following.story.picture().step < 200:
        assert time.monotonic() < deadline
        events += following.look()
    assert writer.wait(120) == 0
    assert [event.step for event in events] == list(range(201)), "every event once"
    assert following.story.picture().run == "run"


def test_half_a_line_waits_for_the_rest_and_a_torn_one_is_passed_over(tmp_path):
    path, following = tmp_path / "events.jsonl", Following(tmp_path)
    line = msgspec.json.encode(step(1))
    path.write_bytes(line[:20])
    assert following.look() == []
    path.write_bytes(line + b"\n" + line[:30])
    assert following.look() == [step(1)]
    with EventLog(path) as log:  # as a program that was started again
        log.write(step(2))
    assert following.look() == [step(2)]


@pytest.mark.parametrize("anew", ["shorter", "another file"])
def test_a_run_begun_anew_is_another_story(tmp_path, anew):
    path, following = tmp_path / "events.jsonl", Following(tmp_path)
    with EventLog(path) as log:
        for number in (1, 2, 3):
            log.write(step(number))
    following.look()
    other = tmp_path / "other.jsonl"
    with EventLog(other) as log:
        for event in [started(), step(1)] if anew == "shorter" else [started(), *map(step, range(1, 9))]:
            log.write(event)
    if anew == "shorter":
        path.write_bytes(other.read_bytes())
    else:
        other.replace(path)
    following.look()
    assert following.story.picture().step == (1 if anew == "shorter" else 8)
    assert len(following.story.picture().curve) == following.story.picture().step


def test_lines_of_another_version_are_left_out_and_counted(tmp_path):
    path, following = tmp_path / "events.jsonl", Following(tmp_path)
    path.write_bytes(b'{"event": "sung", "step": 1}\n' + msgspec.json.encode(step(1)) + b"\n")
    assert following.look() == [step(1)]
    assert following.unknown == 1
    path.write_bytes(msgspec.json.encode(step(2)) + b"\n")  # begun anew
    assert following.look() == [step(2)]
    assert following.unknown == 0


def test_a_tail_begins_at_the_end_unless_all_is_wanted(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    late, whole = Tail(path), Tail(path, whole=True)
    path.write_bytes(b"one\ntwo\nthr")
    assert (late.lines(), whole.lines()) == ([b"two"], [b"one", b"two"])
    path.write_bytes(b"one\ntwo\nthree\n")
    assert (late.lines(), late.lines()) == ([b"three"], [])
