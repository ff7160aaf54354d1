"""What is seen of a run follows from its events alone."""

import io
from itertools import pairwise

import pytest
from rich.console import Console

from tests.live.told import DIM, TOKENS, link, peers, started, step
from thinpipe.core.events import Arrived, Assembled, Departed, Retried, Stopped, Validated
from thinpipe.live.curve import Curve
from thinpipe.live.state import Story, tell_all
from thinpipe.live.terminal import render, sparkline


def test_nothing_told_is_a_picture_too():
    picture = tell_all("r", [])
    assert (picture.state, picture.heard_s, picture.seats, picture.loss) == ("waiting", None, [], None)


def test_the_figures_of_a_run_in_two_processes():
    links = [link(0, True), link(0, False, nbytes=12_800, mbps=1.0)]
    steps = [step(n, links=links, busy=[0.5, 0.9], memory=[10, 20 + n]) for n in range(1, 11)]
    validated = Validated(step=10, loss=4.5, bits_per_byte=None, tokens=1, seconds=1.0)
    picture = tell_all("r", [started(segments=[[0, 1], [2]]), *steps, validated])
    assert (picture.state, picture.step, picture.steps, picture.loss) == ("running", 10, 100, 4.9)
    assert picture.tokens_per_second == pytest.approx(TOKENS / 2.0)
    assert picture.eta_s == pytest.approx(90 * 3.0), "by the clock: what happens between steps takes time too"
    assert [(seat.name, seat.segments) for seat in picture.seats] == [("process 0", [0, 1]), ("process 1", [2])]
    assert [seat.busy for seat in picture.seats] == pytest.approx([0.5, 0.9])
    assert [seat.memory_nbytes for seat in picture.seats] == [10, 30]
    (crossing,) = picture.crossings
    assert (crossing.forward_mbps, crossing.back_mbps) == (2.0, 1.0)
    assert crossing.nbytes_per_token == pytest.approx(38.4)
    assert crossing.waited == pytest.approx(0.25)
    assert picture.compression == pytest.approx(2 * TOKENS * DIM * 2 / 38_400)
    assert (picture.bubble, picture.slowest) == (pytest.approx(0.3), "process 1")
    assert picture.validations == [(10, 4.5)]


def test_one_process_has_a_seat_and_no_links():
    picture = tell_all("r", [started(segments=[[0, 1, 2]]), step(1, memory=[7])])
    assert [(seat.name, seat.busy, seat.memory_nbytes) for seat in picture.seats] == [("process 0", None, 7)]
    assert (picture.compression, picture.bubble, picture.crossings) == (None, None, [])


def test_a_process_with_segments_from_two_places_sits_twice():
    picture = tell_all("r", [started(segments=[[0, 1, 4], [2, 3, 5]]), step(1, memory=[7, 8])])
    assert [(seat.name, seat.segments, seat.memory_nbytes) for seat in picture.seats] == [
        ("process 0", [0, 1], 7),
        ("process 1", [2, 3], 8),
        ("process 0", [4], 7),
        ("process 1", [5], 8),
    ]


def test_eight_seats_do_not_run_out_of_a_narrow_terminal():
    crossings = [link(boundary, forward) for boundary in range(7) for forward in (True, False)]
    events = [started(segments=[[index] for index in range(8)]), step(1, links=crossings, busy=[0.5] * 8)]
    console = Console(width=60, file=io.StringIO())
    console.print(render(tell_all("r", events), 1003.0, width=60))
    printed = console.file.getvalue()
    assert all(f"process {index}" in printed for index in range(8))
    assert printed.count("Mbps →") == 7


def test_an_old_log_says_less_and_is_shown():
    picture = tell_all("r", [started(dim=0), step(1, links=[link(0, True)], busy=[0.5, 0.5])])
    assert [seat.segments for seat in picture.seats] == [[], []]
    assert picture.compression is None


def test_somebody_is_lost_and_the_run_goes_on():
    story = Story("r")
    for event in [Arrived(step=0, peer="anna"), Arrived(step=0, peer="bert"), Arrived(step=0, peer="carl")]:
        story.tell(event)
    story.tell(Assembled(epoch=1, step=0, peers=peers("anna", "bert")))
    assert story.picture().spares == ["carl"]
    story.tell(started())
    for number in (1, 2, 3, 4):
        story.tell(step(number, time_s=100.0 + number))
    story.tell(Departed(step=2, epoch=1, peer="bert", reason="bert is lost", time_s=105.0))
    picture = story.picture()
    assert (picture.state, [seat.here for seat in picture.seats]) == ("recovering", [True, False])
    assert picture.eta_s is None
    story.tell(Assembled(epoch=2, step=2, peers=peers("anna", "carl")))
    story.tell(started(step=2))
    story.tell(step(3, time_s=125.0))
    picture = story.picture()
    assert (picture.state, picture.epoch, picture.spares) == ("running", 2, [])
    (recovery,) = picture.recoveries
    assert (recovery.step, recovery.seconds, recovery.lost_steps) == (4, 20.0, 2)
    assert recovery.reason == "bert is lost"
    assert picture.notes[-1].text == "goes on after 20 s, 2 step(s) computed again"
    assert [number for number, _ in picture.curve] == [1, 2, 3], "what is computed again replaces what was drawn"
    assert [note.kind for note in picture.notes] == [
        *["arrived"] * 3, "assembled", "started", "departed", "assembled", "started", "recovered",
    ]  # fmt: skip


def test_who_leaves_a_finished_run_is_not_missed():
    end = [
        step(100),
        Stopped(step=100, reason="finished"),
        Departed(step=100, epoch=1, peer="anna", reason="anna left"),
    ]
    picture = tell_all("r", [Assembled(epoch=1, step=0, peers=peers("anna")), started(), *end])
    assert (picture.state, picture.seats[0].here, picture.eta_s) == ("finished", True, None)


def test_a_stopped_run_goes_on():
    stopped = [started(), step(1), Stopped(step=1, reason="signal")]
    assert tell_all("r", stopped).state == "stopped: signal"
    assert tell_all("r", [*stopped, started(step=1)]).state == "running"


def test_words_of_peers_move_no_cursor():
    evil = "x\x1b[2J\x9b\u202ey\n"
    events = [
        Assembled(epoch=1, step=0, peers=peers(evil)),
        Retried(step=1, culprit=evil, sender=evil, boundary=0, forward=True, reason="is bad"),
        started(config=evil),
    ]
    picture = tell_all("r", events)
    words = [picture.seats[0].name, *(note.text for note in picture.notes)]
    assert all(word.isprintable() for word in words)
    assert picture.steps == 0


def test_a_long_curve_is_thinned_to_means():
    curve = Curve(most=8)
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
