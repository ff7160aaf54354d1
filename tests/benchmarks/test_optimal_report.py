"""The fits and answers of the study, from made-up records and from gaps whose answer is known."""

import re

import pytest

from benchmarks.optimal.fits import fit_power_law, slope
from benchmarks.optimal.report import report
from benchmarks.optimal.runs import all_runs, share_run, study
from tests.benchmarks.test_convergence import keep

SEEDS = {64: 3, 96: 3, 128: 2}


def law(c, b, *, noise=0.0):
    """Gaps of each width on the law; seeds differ by `noise` %."""
    return {dim: [c * dim**-b * (1 + noise * (seed - 1) / 100) for seed in range(n)] for dim, n in SEEDS.items()}


@pytest.mark.parametrize("b", [-1.0, 0.0, 0.5, 2.0])
def test_a_law_is_found_again(b):
    found = fit_power_law(law(3.0, b))
    assert found.b == found.low == found.high == pytest.approx(b)
    assert found.c == pytest.approx(3.0)
    assert found.shrinks_with_width == (b > 0)


def test_seeds_that_differ_widen_the_interval():
    quiet, loud = fit_power_law(law(30.0, 0.5, noise=1)), fit_power_law(law(30.0, 0.5, noise=60))
    assert quiet.low < 0.5 < quiet.high
    assert quiet.shrinks_with_width
    assert loud.low < 0
    assert not loud.shrinks_with_width


def test_gaps_below_zero_give_no_answer():
    assert not fit_power_law({64: [-1.0, -2.0], 96: [-1.0, -1.5], 128: [-1.0, -2.0]}).shrinks_with_width


def test_a_gap_that_vanishes_shrinks():
    assert fit_power_law({64: [2.0, 2.1], 96: [0.5, 0.6], 128: [-0.1, 0.1]}).shrinks_with_width


def test_the_slope_is_that_of_the_line_through_the_means():
    assert slope({1: [1.0, 3.0], 3: [2.1, 2.1], 7: [2.3, 2.3]}) == pytest.approx(0.05)


def loss_of(run, growth):
    """K32 costs 4 % at d = 64 and less at larger widths, `growth` points more with each boundary; D+ gains 2 %."""
    dense = 4.0 - run.dim / 128 + run.seed / 10
    gap = {"K16": 1.0, "K32": 4.0 * 64 / run.dim + growth * (len(run.cuts) - 3)}.get(run.kind, 0.0)
    return dense * (1.0 if run.kind in ("D", "row") else 0.98) * (1 + gap / 100)


def write_all(output, *, growth=0.0, without=()):
    for _ in range(2):  # the first records decide the rates of the others
        for run in all_runs(output):
            if run.name not in without:
                keep(output, run, [6.0, loss_of(run, growth)])


def test_the_report_answers_both_questions(tmp_path, capsys):
    write_all(tmp_path)
    report(tmp_path)
    page = capsys.readouterr().out
    assert "| 64 | 3 | 3.6000 | 3.5280 | 3.5633 | 3.6691 | -2.00 (-2.00 … -2.00) | -1.02 (-1.02 … -1.02) | " in page
    assert "| +1.00 (+1.00 … +1.00) | +2.67 (+2.67 … +2.67) |" in page
    assert "K16 to D+: gap = 1 d^-b, b = 0.00, 95 % interval 0.00 … 0.00: **no answer" in page
    assert "K32 to D+: gap = 256 d^-b, b = 1.00, 95 % interval 1.00 … 1.00: **shrinks with width**" in page
    assert re.search(r"Slope x 6: [+-]0\.00 points, to be below 0.3: \*\*does not grow with boundaries\*\*", page)
    assert "| D in rotated int4, d = 64 | 3.5 |" in page
    assert "Missing" not in page
    assert (tmp_path / "optimal.md").read_text() in page


@pytest.mark.parametrize(("growth", "answer"), [(0.04, "does not grow"), (0.06, "grows with boundaries, or")])
def test_three_tenths_of_a_point_from_one_to_seven_boundaries_are_too_many(tmp_path, capsys, growth, answer):
    write_all(tmp_path, growth=growth)
    report(tmp_path)
    assert f"points, to be below 0.3: **{answer}" in capsys.readouterr().out


def test_a_question_with_missing_runs_has_no_table_and_no_answer(tmp_path, capsys):
    write_all(tmp_path, without=(study("K32", 128, lr=1.0).name, share_run(0, 1.0).name))
    report(tmp_path)
    page = capsys.readouterr().out
    assert "Missing: K32, d = 128 (seed 0); K32, d = 128 (seed 1)." in page
    assert "Missing: keel of 5 channels, d = 64 (seed 0); " in page
    assert "shrinks with width" not in page
    assert "does not grow with boundaries" in page, "whose runs are complete"


def test_a_run_that_diverged_leaves_no_answer(tmp_path, capsys):
    write_all(tmp_path)
    run = next(run for run in all_runs(tmp_path) if run.name == "K32, d = 96")
    keep(tmp_path, run, [6.0], ended="not_finite")
    report(tmp_path)
    page = capsys.readouterr().out
    assert f"No table. Diverged: {run.key}." in page
    assert "K16 to D+: gap" not in page


def test_a_report_without_records_says_so(tmp_path, capsys):
    report(tmp_path)
    page = capsys.readouterr().out
    assert "- D: no record yet" in page
    assert page.count("No table yet. Missing: ") == 4
