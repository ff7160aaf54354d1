"""What is seen of a run follows from its events alone."""

import io
from itertools import pairwise

import msgspec
import pytest
from rich.console import Console

from tests.monitor.sample_events import DIM, TOKENS, link, peers, started, step
from thinpipe.core.audit_events import CommitMeasured, LossRecomputed
from thinpipe.core.events import Retried, Stopped, Validated
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerJoined, PeerLeft
from thinpipe.monitor.state import DownsampledCurve, RunState
from thinpipe.monitor.terminal import render, sparkline


def snapshot_of(run, events):
    run_state = RunState(run)
    for event in events:
        run_state.on_event(event)
    return run_state.snapshot()


def test_a_log_without_events_has_a_snapshot():
    snapshot = snapshot_of("r", [])
    assert (snapshot.state, snapshot.last_event_s, snapshot.stages, snapshot.loss) == ("waiting", None, [], None)


def test_the_figures_of_a_run_in_two_processes():
    links = [link(0, True), link(0, False, nbytes=12_800, mbps=1.0)]
    steps = [step(n, links=links, busy=[0.5, 0.9], memory=[10, 20 + n]) for n in range(1, 11)]
    validated = Validated(step=10, loss=4.5, bits_per_byte=None, tokens=1, seconds=1.0)
    snapshot = snapshot_of("r", [started(segments=[[0, 1], [2]]), *steps, validated])
    assert (snapshot.state, snapshot.step, snapshot.steps, snapshot.loss) == ("running", 10, 100, 4.9)
    assert snapshot.tokens_per_second == pytest.approx(TOKENS / 2.0)
    assert snapshot.eta_s == pytest.approx(90 * 3.0), "by the clock: what happens between steps takes time too"
    assert [(stage.name, stage.segments) for stage in snapshot.stages] == [("process 0", [0, 1]), ("process 1", [2])]
    assert [stage.busy for stage in snapshot.stages] == pytest.approx([0.5, 0.9])
    assert [stage.memory_nbytes for stage in snapshot.stages] == [10, 30]
    (traffic,) = snapshot.boundary_traffic
    assert (traffic.forward_mbps, traffic.back_mbps) == (2.0, 1.0)
    assert traffic.nbytes_per_token == pytest.approx(38.4)
    assert traffic.waited == pytest.approx(0.25)
    assert snapshot.compression == pytest.approx(2 * TOKENS * DIM * 2 / 38_400)
    assert (snapshot.bubble, snapshot.slowest) == (pytest.approx(0.3), "process 1")
    assert snapshot.validations == [(10, 4.5)]


def test_one_process_has_one_stage_and_no_links():
    snapshot = snapshot_of("r", [started(segments=[[0, 1, 2]]), step(1, memory=[7])])
    assert [(stage.name, stage.busy, stage.memory_nbytes) for stage in snapshot.stages] == [("process 0", None, 7)]
    assert (snapshot.compression, snapshot.bubble, snapshot.boundary_traffic) == (None, None, [])


def test_a_process_with_segments_from_two_places_sits_twice():
    snapshot = snapshot_of("r", [started(segments=[[0, 1, 4], [2, 3, 5]]), step(1, memory=[7, 8])])
    assert [(stage.name, stage.segments, stage.memory_nbytes) for stage in snapshot.stages] == [
        ("process 0", [0, 1], 7),
        ("process 1", [2, 3], 8),
        ("process 0", [4], 7),
        ("process 1", [5], 8),
    ]


def test_eight_stages_fit_a_narrow_terminal():
    boundary_traffic = [link(boundary, forward) for boundary in range(7) for forward in (True, False)]
    events = [started(segments=[[index] for index in range(8)]), step(1, links=boundary_traffic, busy=[0.5] * 8)]
    console = Console(width=60, file=io.StringIO())
    console.print(render(snapshot_of("r", events), 1003.0, width=60))
    printed = console.file.getvalue()
    assert all(f"process {index}" in printed for index in range(8))
    assert printed.count("Mbps →") == 7


def test_who_can_read_the_data_is_said_by_the_newest_generation():
    events = [
        GenerationStarted(generation=number, step=0, peers=peers("anna"), who_reads=f"who can read it: {words}")
        for number, words in enumerate(("all", "the \x1bhub"))
    ]
    snapshot = snapshot_of("r", events)
    assert snapshot.who_reads == "who can read it: the  hub"
    console = Console(file=io.StringIO(), width=60)
    console.print(render(snapshot, 1003.0, width=60))
    assert "\nwho can read it: the  hub\n" in console.file.getvalue()
    assert snapshot_of("r", [GenerationStarted(generation=1, step=0, peers=[])]).who_reads == ""


def test_an_old_log_says_less_and_is_shown():
    snapshot = snapshot_of("r", [started(dim=0), step(1, links=[link(0, True)], busy=[0.5, 0.5])])
    assert [stage.segments for stage in snapshot.stages] == [[], []]
    assert snapshot.compression is None


def test_somebody_is_lost_and_the_run_goes_on():
    run_state = RunState("r")
    for event in [PeerJoined(step=0, peer="anna"), PeerJoined(step=0, peer="bert"), PeerJoined(step=0, peer="carl")]:
        run_state.on_event(event)
    run_state.on_event(GenerationStarted(generation=1, step=0, peers=peers("anna", "bert")))
    assert run_state.snapshot().standbys == ["carl"]
    run_state.on_event(started())
    for number in (1, 2, 3, 4):
        run_state.on_event(step(number, time_s=100.0 + number))
    reason = "bert was lost (no heartbeat for 10 s)"
    run_state.on_event(PeerLeft(step=2, peer="bert", cause="no_heartbeat", reason=reason, time_s=104.5))
    assert run_state.snapshot().state == "running"
    run_state.on_event(
        GenerationEnded(generation=1, step=2, peer="bert", cause="no_heartbeat", reason=reason, time_s=105.0)
    )
    snapshot = run_state.snapshot()
    assert (snapshot.state, [stage.is_connected for stage in snapshot.stages]) == ("recovering", [True, False])
    assert snapshot.eta_s is None
    run_state.on_event(GenerationStarted(generation=2, step=2, peers=peers("anna", "carl")))
    run_state.on_event(started(step=2))
    run_state.on_event(step(3, time_s=125.0))
    snapshot = run_state.snapshot()
    assert (snapshot.state, snapshot.generation, snapshot.standbys) == ("running", 2, [])
    (recovery,) = snapshot.recoveries
    assert (recovery.step, recovery.seconds, recovery.lost_steps) == (4, 20.0, 2)
    assert recovery.reason == reason
    assert snapshot.notes[-1].text == "training continues after 20 s, 2 step(s) computed again"
    assert [number for number, _ in snapshot.curve] == [1, 2, 3], "what is computed again replaces what was drawn"
    assert [note.kind for note in snapshot.notes] == [
        *["peer_joined"] * 3, "generation_started", "started",
        "peer_left", "generation_ended", "generation_started", "started", "recovered",
    ]  # fmt: skip


def test_who_leaves_a_finished_run_is_not_missed():
    end = [
        step(100),
        Stopped(step=100, reason="finished"),
        GenerationEnded(generation=1, step=100, cause="finished", reason="the last step is computed"),
        PeerLeft(step=100, peer="anna", cause="left", reason="anna left"),
    ]
    snapshot = snapshot_of("r", [GenerationStarted(generation=1, step=0, peers=peers("anna")), started(), *end])
    assert (snapshot.state, snapshot.stages[0].is_connected, snapshot.eta_s) == ("finished", True, None)


def test_a_peer_lost_after_the_last_step_does_not_make_a_finished_run_recover():
    lost = GenerationEnded(generation=1, step=100, peer="anna", cause="disconnected", reason="anna was lost")
    end = [step(100), Stopped(step=100, reason="finished"), lost]
    snapshot = snapshot_of("r", [GenerationStarted(generation=1, step=0, peers=peers("anna")), started(), *end])
    assert snapshot.state == "finished"


def test_a_stopped_run_goes_on():
    stopped = [started(), step(1), Stopped(step=1, reason="signal")]
    assert snapshot_of("r", stopped).state == "stopped: signal"
    assert snapshot_of("r", [*stopped, started(step=1)]).state == "running"


def test_words_of_peers_move_no_cursor():
    evil = "x\x1b[2J\x9b\u202ey\n"
    events = [
        GenerationStarted(generation=1, step=0, peers=peers(evil)),
        Retried(step=1, culprit=evil, sender=evil, boundary=0, forward=True, reason="is bad"),
        started(config=evil),
    ]
    snapshot = snapshot_of("r", events)
    words = [snapshot.stages[0].name, *(note.text for note in snapshot.notes)]
    assert all(word.isprintable() for word in words)
    assert snapshot.steps == 0


def test_a_long_curve_is_thinned_to_means():
    curve = DownsampledCurve(max_points=8)
    for number in range(1, 1001):
        curve.add(number, float(number))
    points = curve.points
    assert len(points) <= 8
    assert points[-1][0] == 1000
    assert [value for _, value in points] == sorted(value for _, value in points)
    widths = [b - a for (a, _), (b, _) in pairwise(points)]
    assert len(set(widths[:-1])) == 1
    assert points[0][1] == pytest.approx((1 + points[0][0]) / 2)


@pytest.mark.parametrize(("values", "line"), [([], ""), ([3.0], "▁"), ([1.0, 2.0], "▁█"), ([8, 4, 2, 1, 1, 1], "█▂▁")])
def test_a_sparkline(values, line):
    assert sparkline(values, 3) == line


def test_what_the_hub_computes_is_shown_beside_what_is_reported_and_an_alarm_above():
    true = LossRecomputed(step=6, reported=4.94, recomputed=4.94, band=1e-3, peers=["zoe"], seconds=1.0)
    commit = CommitMeasured(
        step=5, loss=5.1, reported=4.95, expected_difference=0.1, margin=0.1, peers=["zoe"], seconds=1.0
    )
    honest = snapshot_of("r", [started(), *map(step, range(1, 7)), true, commit])
    assert (honest.recomputed, honest.commit_losses, honest.alarms) == ([(6, 4.94)], [(5, 5.1)], [])
    assert "computed again by the hub: 4.9400" in honest.audit
    false = msgspec.structs.replace(true, step=7, recomputed=7.5)
    worse = msgspec.structs.replace(commit, step=10, loss=7.5)
    snapshot = snapshot_of("r", [started(), *map(step, range(1, 11)), false, worse])
    assert ["7.5000" in alarm and "zoe" in alarm for alarm in snapshot.alarms] == [True, True]
    console = Console(file=io.StringIO(), width=400)
    console.print(render(snapshot, 1030.0))
    assert "ALARM: loss 4.9400 was reported, and the hub computes 7.5000" in console.file.getvalue()
