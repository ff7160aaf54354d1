"""One rule for every study: what counts as a difference, what hurts badly, and what each claim of the paper needs."""

import math
from functools import partial

import numpy as np
import pytest

from benchmarks.lossy_claims import FEEDBACKS, MASKS, Evidence, decide
from benchmarks.verdicts import NO_DIFFERENCE, Finding, Judge, Measured, Verdict, claim_table, lowest, spread, tally

JUDGE = Judge(before=5.0, uncompressed=4.0)
KEPT = (0.5, 0.3, 0.2, 0.1, 0.05)
SEEDS = (-0.001, 0.0, 0.001)


def losses(lost):
    """Three seeds around this share of a gain of 1."""
    return tuple(4.0 + lost + seed for seed in SEEDS)


def run(on, off=None):
    return Measured(on=losses(on), off=losses(on if off is None else off))


def test_worse_is_apart_with_every_seed_and_by_more_than_the_margin():
    assert JUDGE.worse(losses(0.1), losses(0.05)) == (True, "worse")
    assert JUDGE.worse(losses(0.05), losses(0.1)) == (False, "better")
    assert JUDGE.worse(losses(0.009), losses(0.0)) == (None, NO_DIFFERENCE)
    assert JUDGE.worse((4.0, 4.5, 4.6), (4.1, 4.1, 4.1)) == (None, NO_DIFFERENCE)
    assert JUDGE.not_better((4.0, 4.5, 4.6), (4.1, 4.1, 4.1)) == (True, NO_DIFFERENCE)
    assert JUDGE.not_better(losses(0.05), losses(0.1)) == (False, "better")


@pytest.mark.parametrize("lost", [math.inf, math.nan])
def test_what_is_not_finite_decides_nothing(lost):
    for pair in ((losses(lost), losses(lost)), (losses(lost), losses(0)), (losses(0), losses(lost))):
        assert JUDGE.worse(*pair) == JUDGE.not_better(*pair) == (None, "not finite")
    assert JUDGE.hurts_badly(losses(lost)) == (None, "not finite")
    assert Judge(before=4.0, uncompressed=4.5).hurts_badly(losses(0)).holds is None, "nothing was gained"


def test_fewer_than_three_seeds_decide_nothing():
    assert JUDGE.worse(losses(1)[:2], losses(0)) == (None, "2 of 3 seeds")
    assert JUDGE.hurts_badly(()) == (None, "0 of 3 seeds")


def test_badly_is_a_share_of_the_gain_with_every_seed():
    assert [JUDGE.hurts_badly(losses(lost)).holds for lost in (0.3, 0.2, 0.25)] == [True, False, None]


def findings(*answers):
    return [Finding(answer, "word") for answer in answers]


def test_verdicts_need_half_of_the_strengths_and_no_voice_against():
    assert tally(findings(True, True, None, None)) == Verdict("reproduced")
    assert tally(findings(False, False, None, None)) == Verdict("refuted")
    assert str(tally(findings(True, True, True, False))) == "not decided: strengths disagree"
    assert str(tally(findings(True, None, None, None))) == str(tally(findings(None, None))) == "not decided: word"
    assert tally([]).ruling == "not decided"


@pytest.mark.parametrize(
    ("badly", "verdict"),
    [
        ((False, False, True), "reproduced"),
        ((False, True, True), "refuted"),
        ((False, False, False), "not decided: nothing hurts badly here"),
        ((False, None, True), "not decided: word"),
        ((False, False, None), "not decided: word"),
    ],
)
def test_the_lowest_level_is_the_last_before_the_fall(badly, verdict):
    assert str(lowest(dict(zip((0.2, 0.1, 0.05), findings(*badly), strict=True)), 0.1)) == verdict


def test_a_fall_that_comes_later_refutes():
    assert lowest(dict(zip((0.1, 0.05, 0.02), findings(False, False, True), strict=True)), 0.1).ruling == "refuted"


def test_noise_refutes_nothing():
    """An easy task, where nothing tells a compression from another."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        drawn = {name: noise(generator) for name in CONFIGURATIONS}
        found = verdicts(drawn)
        assert {found[text] for text in found if text.startswith("K = 10")} == {"not decided: nothing hurts badly here"}
        assert {found[text] for text in found if "AQ-SGD" in text} == {"not decided: nothing hurts badly here"}
        assert not any(found[text] == "reproduced" for text in found if "switched off" in text)


def noise(generator):
    on, off = 4.0 + 0.01 * generator.standard_normal((2, 3))
    return Measured(on=tuple(on), off=tuple(off))


CONFIGURATIONS = [
    *((what, keep) for what in ("gradients", "activations", *MASKS) for keep in KEPT),
    *((what, bits) for what in ("gradients", "activations") for bits in (8, 4)),
    *((feedback, masks, keep) for feedback in FEEDBACKS for masks in MASKS for keep in KEPT[:-1]),
]


def evidence(runs):
    def levels(*what):
        return {key[-1]: run for key, run in runs.items() if key[:-1] == what and key[-1] < 1}

    def bits(what):
        return {key[-1]: run for key, run in runs.items() if key[:-1] == (what,) and key[-1] > 1}

    return Evidence(
        topk_gradients=levels("gradients"),
        topk_activations=levels("activations"),
        quantised_gradients=bits("gradients"),
        quantised_activations=bits("activations"),
        topk={masks: levels(masks) for masks in MASKS},
        feedbacks={(feedback, masks): levels(feedback, masks) for feedback in FEEDBACKS for masks in MASKS},
    )


def verdicts(runs):
    found = {}
    for claim in decide(evidence(runs), JUDGE):
        way = "reused" if "same places" in claim.configuration else "own"
        found[f"{claim.text}, {way}"] = str(claim.verdict)
    return found


def as_in_the_paper():
    """Only masks of their own: with them K = 10 % is the floor, and feedback makes up for what inference lost."""
    runs = dict.fromkeys(CONFIGURATIONS, run(0.0))
    for keep in KEPT:
        runs["gradients", keep] = run(0.2)
        runs["activations", keep] = run(0.05, 0.4)
        runs["own masks", keep] = run(0.3 if keep < 0.1 else 0.15, 0.5)
        runs["mask reused", keep] = run(0.1)
    for keep in KEPT[:-1]:
        runs["EF", "own masks", keep] = runs["EF21", "own masks", keep] = run(0.155, 0.16)
        runs["AQ-SGD", "own masks", keep] = run(0.1 if keep >= 0.3 else 0.6)
    return runs | {("gradients", bits): run(0.1) for bits in (8, 4)}


def test_the_papers_figures_reproduce_every_claim():
    found = verdicts(as_in_the_paper())
    own = {text: verdict for text, verdict in found.items() if text.endswith("own")}
    assert set(own.values()) == {"reproduced"}
    assert len(own) == len({claim.text for claim in decide(evidence(as_in_the_paper()), JUDGE)}) == 10


LOWEST = "K = 10% is the lowest TopK that does not hurt badly"
NEEDED = "A model trained with TopK works well only if compression stays on at inference"
FREED = "Error feedback lets compression be switched off at inference with almost no drop: EF"
HELPS = "Error feedback does not help training: EF"
AQSGD = "TopK with AQ-SGD hurts badly below 30%"
MILDER = "Gradients need milder compression than activations"
REUSED = "The backward pass should reuse the forward mask (and sends no positions)"


@pytest.mark.parametrize(
    ("what", "measured", "text", "verdict"),
    [
        ("EF", run(math.inf), FREED, "not decided: not finite"),
        ("EF", run(3.0), FREED, "refuted"),  # useless in the same way on and off
        ("EF", run(0.0, 0.2), FREED, "refuted"),  # not badly, but a drop
        ("own masks", run(0.15), FREED, "not decided: plain off is not bad"),
        ("EF", run(0.1), HELPS, "refuted"),
        ("EF", run(0.15), HELPS, "reproduced"),
        ("EF", run(math.inf), HELPS, "not decided: not finite"),
        ("own masks", run(0.15, 0.1), NEEDED, "refuted"),
        ("own masks", run(3.0, 4.0), NEEDED, "not decided: on is bad too"),
        ("own masks", run(0.3), LOWEST, "refuted"),
        ("own masks", run(0.2), LOWEST, "not decided: nothing hurts badly here"),
        ("own masks", run(0.6), AQSGD, "not decided: against plain TopK of the same share no difference"),
        ("AQ-SGD", run(0.6), AQSGD, "refuted"),
        ("gradients", run(0.05), MILDER, "not decided: no difference"),
        ("gradients", run(0.0), MILDER, "refuted"),
        ("own masks", run(0.0), REUSED, "refuted"),
        ("own masks", run(0.1), REUSED, "not decided: no difference"),
    ],
)
def test_other_figures_give_other_verdicts(what, measured, text, verdict):
    changed = {key: measured for key in CONFIGURATIONS if key[0] == what and (len(key) == 2 or key[1] == "own masks")}
    assert verdicts(as_in_the_paper() | changed)[f"{text}, own"] == verdict


def test_the_table_shows_what_half_and_double_the_bar_would_say():
    lines = list(claim_table(JUDGE, partial(decide, evidence(as_in_the_paper()))))
    assert lines[0].endswith("| verdict | if badly were 12.5% | 50.0% |")
    row = next(line for line in lines if line.startswith(f"| {LOWEST} | TopK in both directions"))
    assert row.endswith("| **reproduced** | refuted | not decided: nothing hurts badly here |")
    assert "rounded to the nearest and gradients at random" in next(line for line in lines if "Quantisation" in line)
    assert {line.count("|") for line in lines} == {7}


def test_spread_is_half_the_range():
    assert spread([1.0, 2.0, 1.5]) == "+1.500 ± 0.500"
    assert spread([0.25], ".0%") == "+25%"
    assert spread([]) == "missing"
    assert spread([1.0, math.inf]) == "not finite"
