"""What is read off a log: last attempts, smoothing, where the time went, bytes."""

import pytest

from tests.report.logs import TOKENS, started, step, stopped, validated, write
from thinpipe.core.events import LinkTraffic
from thinpipe.pipeline.placement import place
from thinpipe.report.comparison import loss_difference
from thinpipe.report.figures import smoothed, smoothing_width
from thinpipe.report.summary import summarise
from thinpipe.report.time_spent import _receivers, time_spent
from thinpipe.report.traffic import traffic_of


def test_the_last_attempt_of_a_step_counts(tmp_path):
    run = write(
        tmp_path,
        started(),
        step(1),
        step(2, loss=9.0),
        step(3, loss=9.0),
        started(1, resumed_from="x"),
        step(2, loss=4.0),
        step(3, loss=3.0),
    )
    summary = summarise(run)
    assert [each.loss for each in summary.steps] == [4.99, 4.0, 3.0]
    assert [each.step for each in summary.repeated] == [2, 3]
    assert summary.seconds == 3.0
    assert summary.ended is None
    write(tmp_path, stopped(3, "signal"))
    assert summarise(run).ended == "signal"
    write(tmp_path, started(3))
    assert summarise(run).ended is None


def test_a_mean_neither_lags_nor_bends_a_line():
    line = [10 - 0.1 * place for place in range(50)]
    places, means = smoothed(range(50), line, 7)
    assert places == list(range(3, 47))
    assert means == pytest.approx([line[place] for place in places])
    assert smoothed([1], [5.0], smoothing_width(1)) == ([1], [5.0])
    assert smoothing_width(400) == 21
    assert smoothing_width(10**6) == 201


def test_the_time_of_a_process_is_what_its_step_took(tmp_path):
    summary = summarise(write(tmp_path, *(step(number, processes=3) for number in (1, 2))))
    spent = time_spent(summary.steps, [["a", "b", "c"], []])
    assert list(spent) == ["a", "b", "c", "process 0", "process 1", "process 2"]
    assert spent["a"].waiting == 0.0
    assert spent["a"].computing == pytest.approx(0.8)  # 800 bytes at 0.008 Mbps
    # It waited 0.2 s, and computed for the other three quarters of its pass.
    assert (spent["b"].waiting, spent["b"].computing, spent["b"].rest) == pytest.approx((0.2, 0.6, 0.2))
    assert all(each.total == pytest.approx(1.0) for each in spent.values())


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_who_receives_is_read_off_the_links(schedule, processes):
    """Against the places that the pipeline gives, also where a stage has several segments."""
    segments = 2 * processes + 3
    process_of_segment = place(schedule, processes, segments).process_of_segment
    crossed = [cut for cut in range(segments - 1) if process_of_segment[cut] != process_of_segment[cut + 1]]
    links = [LinkTraffic(boundary=cut, forward=True, nbytes=1, waited_s=0.0, mbps=1.0) for cut in crossed]
    found = _receivers(step(1, links=links, busy=[1.0] * processes))
    assert found == {cut: (process_of_segment[cut], process_of_segment[cut + 1]) for cut in crossed}


def test_bytes_are_those_of_the_log(tmp_path):
    summary = summarise(write(tmp_path, *(step(number, processes=3) for number in (1, 2))))
    traffic = traffic_of(summary.steps, dim=64, tokens_per_step=TOKENS)
    assert traffic.sent_nbytes == 2 * 4 * 800
    assert traffic.dense_nbytes == 2 * 4 * TOKENS * 64 * 2
    assert "20.5 times less" in traffic.description


def test_the_cost_is_taken_where_both_runs_have_been(tmp_path):
    short = summarise(write(tmp_path / "short", step(1), step(2), validated(1, 4.0), validated(2, 3.5)))
    long = summarise(write(tmp_path / "long", *map(step, range(1, 5)), validated(2, 3.0), validated(4, 1.0)))
    assert loss_difference(short, long) == (3.5, 3.0, "validation loss after 256 tokens")
    bare = summarise(write(tmp_path / "bare", step(1, loss=2.0)))
    assert loss_difference(long, bare) == (4.99, 2.0, "training loss, mean of 1 steps up to 128 tokens")
