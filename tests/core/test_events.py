"""The event log: a fixed schema, whole lines."""

import msgspec
import pytest

from thinpipe.core.event_text import format_event, format_event_line
from thinpipe.core.events import (
    EventLog,
    LinkTraffic,
    Saved,
    Skipped,
    Step,
    Stopped,
    read_events,
    read_events_of_any_version,
)
from thinpipe.core.hub_events import (
    CheckpointDamaged,
    CheckpointRepaired,
    GenerationEnded,
    GenerationStarted,
    PeerAssignment,
    PeerJoined,
    PeerLeft,
    RolledBack,
)

STEP = Step(step=1, loss=2.0, grad_norm=0.5, lr=1e-3, tokens=10, seconds=0.1, tokens_per_second=100.0)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "events.jsonl"
    events = [STEP, Skipped(step=2, loss=None, culprit="loss"), Stopped(step=2, reason="finished")]
    with EventLog(path) as log:
        for event in events:
            log.write(event)
    assert list(read_events(path)) == events
    assert path.read_text().splitlines()[0].startswith('{"event":"step","time_s":')


def test_a_line_cut_short_by_a_crash_is_passed_over_and_closed(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(STEP)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert list(read_events(path)) == [STEP]
    with EventLog(path) as log:
        log.write(STEP)
    assert list(read_events(path)) == [STEP, STEP]


def test_a_damaged_line_is_passed_over(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(Stopped(step=3, reason="signal"))
    written = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(written.replace(b"signal", b"sig\xff\xfe!") + written)
    assert [event.reason for event in read_events(tmp_path / "events.jsonl")] == ["signal"]
    assert read_events_of_any_version(tmp_path / "events.jsonl")[1] == 0


def test_a_log_of_before_these_fields_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(STEP).replace(b',"memory":[]', b"").replace(b',"links":[]', b"") + b"\n")
    assert b"memory" not in path.read_bytes()
    assert list(read_events(path)) == [STEP]


def test_who_comes_and_goes_is_said_in_words():
    peers = [PeerAssignment(name="anna", segments=[0, 1]), PeerAssignment(name="bert", segments=[2])]
    assert "generation 2 starts from step 4: anna (segments 0 to 1), bert (segment 2)" in format_event_line(
        GenerationStarted(generation=2, step=4, peers=peers)
    )
    assert format_event_line(PeerJoined(step=0, peer="anna")).endswith("anna joined")
    assert format_event_line(PeerLeft(step=3, peer="bert", cause="left", reason="bert left")).endswith("bert left")
    ended = GenerationEnded(generation=2, step=120, peer="bert", cause="left", reason="bert left")
    assert format_event(ended) == "bert left: regrouping from step 120"
    finished = GenerationEnded(generation=2, step=120, cause="finished", reason="the last step is computed")
    assert format_event(finished) == "generation 2 ended: the last step is computed"


def test_the_slowest_is_named_by_its_peer_in_a_run_of_peers():
    link = LinkTraffic(boundary=0, forward=True, nbytes=10, waited_s=0.5, mbps=1.0)
    step = msgspec.structs.replace(STEP, links=[link], busy=[0.5, 1.0])
    assert "(slowest: bert)" in format_event(step, ["anna", "bert"])
    assert "(slowest: process 1)" in format_event(step)


def test_what_becomes_of_a_damaged_checkpoint_is_said_in_words():
    lost = "the hub has lost blocks.3 of step 120 (copies at carol, not connected)"
    damaged = CheckpointDamaged(step=120, layers=["blocks.3"], reason=lost)
    assert format_event(damaged) == f"{lost}: asking all connected peers for copies"
    assert format_event(CheckpointRepaired(step=120)) == "the hub has all files of step 120 again"
    rolled_back = RolledBack(step=90, lost_step=120, reason=lost, folder="lost-step-00000120")
    assert format_event(rolled_back) == (
        f"{lost}: going back from step 120 to step 90; the remaining files of step 120 are in lost-step-00000120"
    )


def test_another_schema_is_an_error(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "step", "step": "one"}\n')
    with pytest.raises(msgspec.ValidationError):
        list(read_events(path))


def test_the_names_of_fields_are_fixed():
    """Changing one breaks everybody's plots: do it on purpose."""
    names = {kind.__name__: kind.__struct_fields__ for kind in (Step, LinkTraffic, Saved)}
    numbers = ("time_s", "step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second")
    assert names == {
        "Step": (*numbers, "links", "busy", "memory"),
        "LinkTraffic": ("boundary", "forward", "nbytes", "waited_s", "mbps"),
        "Saved": ("time_s", "step", "path", "nbytes", "seconds"),
    }
