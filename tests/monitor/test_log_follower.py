"""A log that somebody else writes: before it is there, while it grows, with torn lines, and begun anew."""

import os
import subprocess
import sys
import time

import msgspec
import pytest

from tests.monitor.sample_events import started, step
from thinpipe.core.events import EventLog
from thinpipe.core.log_tail import Tail
from thinpipe.monitor.log_follower import LogFollower

WRITER = """
import sys
from pathlib import Path
from tests.monitor.sample_events import started, step
from thinpipe.core.events import EventLog
with EventLog(Path(sys.argv[1])) as log:
    log.write(started())
    for number in range(1, 201):
        log.write(step(number))
"""


def test_a_file_that_another_process_writes(tmp_path):
    follower = LogFollower(tmp_path / "run")
    assert follower.poll() == []
    assert follower.run_state.snapshot().state == "waiting"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), os.getcwd()])}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "run" / "events.jsonl"], env=environment)
    events, deadline = [], time.monotonic() + 120
    while follower.run_state.snapshot().step < 200:
        assert time.monotonic() < deadline
        events += follower.poll()
    assert writer.wait(120) == 0
    assert [event.step for event in events] == list(range(201)), "every event once"
    assert follower.run_state.snapshot().run == "run"


def test_half_a_line_waits_for_the_rest_and_a_torn_one_is_passed_over(tmp_path):
    path, follower = tmp_path / "events.jsonl", LogFollower(tmp_path)
    line = msgspec.json.encode(step(1))
    path.write_bytes(line[:20])
    assert follower.poll() == []
    path.write_bytes(line + b"\n" + line[:30])
    assert follower.poll() == [step(1)]
    with EventLog(path) as log:  # as a program that was started again
        log.write(step(2))
    assert follower.poll() == [step(2)]


@pytest.mark.parametrize("anew", ["shorter", "another file"])
def test_a_restarted_log_resets_the_run_state(tmp_path, anew):
    path, follower = tmp_path / "events.jsonl", LogFollower(tmp_path)
    with EventLog(path) as log:
        for number in (1, 2, 3):
            log.write(step(number))
    follower.poll()
    other = tmp_path / "other.jsonl"
    with EventLog(other) as log:
        for event in [started(), step(1)] if anew == "shorter" else [started(), *map(step, range(1, 9))]:
            log.write(event)
    if anew == "shorter":
        path.write_bytes(other.read_bytes())
    else:
        other.replace(path)
    follower.poll()
    assert follower.run_state.snapshot().step == (1 if anew == "shorter" else 8)
    assert len(follower.run_state.snapshot().curve) == follower.run_state.snapshot().step


def test_lines_of_another_version_are_left_out_and_counted(tmp_path):
    path, follower = tmp_path / "events.jsonl", LogFollower(tmp_path)
    path.write_bytes(b'{"event": "sung", "step": 1}\n' + msgspec.json.encode(step(1)) + b"\n")
    assert follower.poll() == [step(1)]
    assert follower.unknown == 1
    path.write_bytes(msgspec.json.encode(step(2)) + b"\n")  # begun anew
    assert follower.poll() == [step(2)]
    assert follower.unknown == 0


def test_a_tail_begins_at_the_end_unless_all_is_wanted(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    late, whole = Tail(path), Tail(path, whole=True)
    path.write_bytes(b"one\ntwo\nthr")
    assert (late.lines(), whole.lines()) == ([b"two"], [b"one", b"two"])
    path.write_bytes(b"one\ntwo\nthree\n")
    assert (late.lines(), late.lines()) == ([b"three"], [])
