"""Sudden changes of what crosses a boundary are named, and slow ones, noise and odd batches are not."""

import math
import random

import pytest

from thinpipe.pipeline.message_figures import Figures
from thinpipe.training.boundary_watch import BoundaryWatch
from thinpipe.training.step_outcome import BoundaryFigures

NAMES = ["anna", "bert", "zoe"]


def watch(**more):
    return BoundaryWatch([0, 1, 2], NAMES.__getitem__, **more)


def both(rms, mean=0.0, *, sent_rms=None, sent_mean=None, boundary=0, forward=True):
    sent = Figures(rms if sent_rms is None else sent_rms, mean if sent_mean is None else sent_mean)
    return BoundaryFigures(boundary, forward, sent, Figures(rms, mean))


def alarms(figures, begin=0, **more):
    found = watch(**more)
    return [alarm for step, each in enumerate(figures, begin + 1) for alarm in found.observe(step, [each])]


def noisy(count, size=1.0, noise=0.02, seed=1):
    draw = random.Random(seed)
    return [size * math.exp(draw.gauss(0.0, noise)) for _ in range(count)]


@pytest.mark.parametrize(("forward", "sender"), [(True, "bert"), (False, "zoe")])
def test_a_sudden_change_names_the_sender(forward, sender):
    sizes = noisy(200) + noisy(50, size=2.0)
    (alarm,) = alarms([both(size, boundary=1, forward=forward) for size in sizes])
    assert (alarm.step, alarm.kind, alarm.peers) == (203, "size", [sender])
    assert (alarm.boundary, alarm.forward) == (1, forward)
    assert alarm.usual == pytest.approx(0.0, abs=0.02)
    assert alarm.figure == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.parametrize(("forward", "pair"), [(True, ["anna", "bert"]), (False, ["bert", "anna"])])
def test_ends_that_begin_to_differ_name_both(forward, pair):
    same = [both(size, forward=forward) for size in noisy(100)]
    other = [both(size, sent_rms=1.1 * size, forward=forward) for size in noisy(20)]
    (alarm,) = alarms(same + other)
    assert (alarm.step, alarm.kind, alarm.peers) == (103, "ends differ in size", pair)
    moved = [both(size, 0.0, sent_mean=0.5, forward=forward) for size in noisy(20)]
    (alarm,) = alarms(same + moved)
    assert (alarm.step, alarm.kind, alarm.peers) == (103, "ends differ in mean", pair)


def test_ends_in_one_process_name_it_once():
    found = BoundaryWatch([0, 0], NAMES.__getitem__)
    steps = [both(1.0)] * 100 + [both(1.0, sent_rms=2.0)] * 3
    (alarm,) = (alarm for step, each in enumerate(steps, 1) for alarm in found.observe(step, [each]))
    assert alarm.peers == ["anna"]


def test_a_trend_noise_and_a_pair_of_odd_batches_are_no_change():
    sizes = [size * math.exp(-step / 300) for step, size in enumerate(noisy(2000, noise=0.05))]
    for step in range(100, 2000, 10):
        sizes[step] *= 100.0
        sizes[step + 1] /= 100.0
    assert alarms([both(size, mean=0.1 * size) for size in sizes]) == []


def test_what_was_always_so_is_no_change():
    assert alarms([both(size, sent_rms=3 * size) for size in noisy(500)]) == []


def test_a_change_of_basis_changes_means_and_nothing_else():
    before, after = ([both(size, mean * size) for size in noisy(100)] for mean in (0.4, -0.4))
    assert [alarm.kind for alarm in alarms(before + after)] == ["mean"]
    assert alarms(before + after, basis_interval=100) == []
    larger = [both(3.0 * size, -1.2 * size) for size in noisy(100)]
    assert [alarm.kind for alarm in alarms(before + larger, basis_interval=100)] == ["size"]


def test_nonsense_and_silence_are_not_judged():
    """Bad values are a fault of the step, which is named elsewhere."""
    steps = [both(size) for size in noisy(100)]
    for nonsense in (math.nan, math.inf, 0.0, -1.0):
        bad = [both(nonsense), both(1.0, math.nan), both(1.0, sent_rms=nonsense, sent_mean=nonsense)]
        assert alarms(steps + bad * 10) == []
    assert alarms([both(0.0)] * 100 + [both(1.0)] * 40) == []
