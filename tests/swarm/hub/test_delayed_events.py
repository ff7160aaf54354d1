"""A full disk delays events and costs no more memory than it may."""

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.swarm.hub.test_training_host import host
from thinpipe.core.events import read_events
from thinpipe.core.hub_events import PeerJoined
from thinpipe.swarm.hub.delayed_events import DelayedEvents

CANNOT_WRITE = "the event log cannot be written (No space left on device): free disk space at the hub"
MISSING = "{} event(s) are missing in the event log, because the disk was full"


def joined(peer):
    return PeerJoined(step=0, peer=peer, time_s=1.0)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def make_log(tmp_path, reports):
    """A log with room for this many events in memory, and a way to fill and to empty its disk."""
    with Path("/dev/full").open("ab", buffering=0) as full, ExitStack() as files:

        def make(n_events):
            nbytes = len(msgspec.json.encode(joined("a")))
            events = DelayedEvents(tmp_path / "events.jsonl", reports.append, max_nbytes=n_events * nbytes)
            good = files.enter_context(events.log._file)

            def fill(is_full):
                events.log._file = full if is_full else good

            return events, fill

        yield make


def peers_in(folder):
    return "".join(event.peer for event in read_events(folder / "events.jsonl"))


def test_what_a_full_disk_delays_is_written_later_in_order_and_reported_once(make_log, reports, tmp_path):
    events, fill = make_log(9)
    fill(True)
    events.write(joined("a"))
    events.write(joined("b"))
    assert reports == [CANNOT_WRITE]
    fill(False)
    events.write(joined("c"))
    assert peers_in(tmp_path) == "abc"
    events.close()
    assert reports == [CANNOT_WRITE], "nothing is missing"


def test_the_oldest_beyond_the_budget_are_dropped_and_counted(make_log, reports, tmp_path):
    events, fill = make_log(2)
    fill(True)
    for peer in "abcde":
        events.write(joined(peer))
    assert reports == [CANNOT_WRITE]
    fill(False)
    events.write(joined("f"))
    events.write(joined("g"))
    assert peers_in(tmp_path) == "defg"
    assert reports == [CANNOT_WRITE, MISSING.format(3)]
    fill(True)
    events.write(joined("h"))
    fill(False)
    events.close()
    assert reports == [CANNOT_WRITE, MISSING.format(3), CANNOT_WRITE]
    assert peers_in(tmp_path) == "defgh", "the end of the run writes what waits"


def test_what_waits_when_the_disk_stays_full_is_counted_at_the_end(make_log, reports, tmp_path):
    events, fill = make_log(2)
    fill(True)
    for peer in "abc":
        events.write(joined(peer))
    events.close()
    assert reports == [CANNOT_WRITE, MISSING.format(3)]
    assert peers_in(tmp_path) == ""


def test_a_full_disk_under_the_event_log_is_reported_and_what_it_delays_is_written_at_the_end(run_config):
    run = host(run_config)
    log = run._delayed_events.log
    good = log._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        log._file = full
        run.on_event(PeerJoined(step=0, peer="a"))
    assert "the event log cannot be written" in run.display.console.file.getvalue()
    log._file = good
    run.close()
    assert [event.peer for event in read_events(run_config.job.dump_folder / "events.jsonl")] == ["a"]
