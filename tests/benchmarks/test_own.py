"""The study of the keel compares like with like, and counts what it sends."""

import re
import tomllib
from dataclasses import replace

import msgspec
import pytest

from benchmarks.convergence.clock import Timed, Times, key
from benchmarks.convergence.execute import is_done, result_path, settings_of
from benchmarks.convergence.results import CONTROL, read_results
from benchmarks.convergence.study import trainable
from benchmarks.own.report import report
from benchmarks.own.runs import DENSE, RATES, SHORT, WHOLE, WIDE, all_runs, control, keel, steps_to_loss
from tests.benchmarks.test_convergence import keep
from thinpipe.config.toml import differences

BASELINES = {
    (run.tokens, run.shape, run.seed): run
    for run in all_runs()
    if run.name in ("dense", "dense, d = 512") and run.lr == DENSE.lr and run.question != CONTROL
}
DENSE_CONTROL = {run.seed: run for run in control() if run.name == DENSE.name}
TO_A_LOSS = next(run for run in steps_to_loss() if run.name == "dense, 1 times the tokens")


def dense_like(study):
    """The dense run that it is compared with; one to a loss with the one such run of dense, a control with its own."""
    if study.question == CONTROL:
        return DENSE_CONTROL[study.seed]
    to_a_loss = study.question == TO_A_LOSS.question
    dense = TO_A_LOSS if to_a_loss else BASELINES[study.tokens, study.shape, study.seed]
    return replace(dense, tokens=study.tokens, seed=study.seed, lr=DENSE.lr)


def test_at_least_as_many_times_fewer_bytes_as_the_name_says():
    named = [(study, re.search(r"\b(\d+)x", study.name)) for study in all_runs()]
    assert sum(found is not None for _, found in named) > 20
    for study, found in named:
        if found:
            ratio = dense_like(study).nbytes_per_token / study.nbytes_per_token
            assert float(found[1]) * 0.95 <= ratio <= float(found[1]) * 1.1, study.name
            assert ratio >= float(found[1]) or "keel" not in study.name, "of our own nothing is rounded"


def test_all_train_as_many_numbers_as_dense():
    for study in all_runs():
        near = 1e-3 if study.matched else 0.03
        assert trainable(study.model) == pytest.approx(trainable(dense_like(study).model), rel=near), study.name


def test_runs_differ_in_what_they_ask_and_in_nothing_else():
    asked = ("model.", "boundary.", "optimizer.lr", "debug.seed")
    of_schedules = tuple(
        f"lr_scheduler.{name}" for name in ("warmup_steps", "decay_type", "decay_ratio", "min_lr_factor")
    )
    of_question = {"steps to loss": of_schedules} | dict.fromkeys(("boundaries", "pieces"), ("execution.compile",))
    for study in all_runs():
        dense_elsewhere = study.name.startswith("dense") and study.question != CONTROL
        allowed = of_question.get(study.question, ("execution.compile",) if dense_elsewhere else ())
        changed = differences(tomllib.loads(settings_of(dense_like(study))), tomllib.loads(settings_of(study)))
        assert [name for name in changed if not f"{name}.".startswith(asked) and name not in allowed] == [], study.name


def test_boundaries_and_pieces_are_compared_among_themselves():
    """They are compiled and the dense run of as many tokens is not: other roundings."""
    compiled = [study for study in all_runs() if study.question in ("boundaries", "pieces")]
    assert len(compiled) > 5
    asked = ("model.projection", "model.boundaries", "model.hidden_dim", "boundary.")
    three = next(study for study in compiled if study.name == "keel 32x, 3 boundaries")
    for study in compiled:
        changed = differences(tomllib.loads(settings_of(three)), tomllib.loads(settings_of(study)))
        assert [name for name in changed if not f"{name}.".startswith(asked)] == [], study.name


def test_a_record_that_knows_fewer_settings_is_still_one_of_its_run(tmp_path):
    """Settings that came later have their defaults in it."""
    keep(tmp_path, DENSE, [5.0])
    path = result_path(DENSE, tmp_path)
    text = path.read_text()
    path.write_text(re.sub(r"token_prior_window = 1\\n", "", text))
    assert "token_prior_window" in text
    assert "token_prior_window" not in path.read_text()
    assert is_done(DENSE, tmp_path)
    assert not is_done(replace(DENSE, boundary=keel(16).boundary), tmp_path)


def test_each_width_is_compared_with_its_own_dense_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = {study.name: study for study in all_runs() if study.seed == 0 and study.lr == DENSE.lr}
    (another_rate,) = (study for study in all_runs() if study.name == "dense, d = 512" and study.lr != DENSE.lr)
    keep(tmp_path, DENSE, [5.0, 4.0])
    keep(tmp_path, keel(32), [5.0, 4.04])
    keep(tmp_path, runs["dense, d = 512"], [3.0, 2.0])
    keep(tmp_path, another_rate, [3.0, 1.99])
    keep(tmp_path, runs["keel 64x, d = 512"], [3.0, 2.01])
    report(tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"\| keel 32x \|.*\| 32.0x \|.*\| \+1.00 \|", text)
    assert re.search(r"\| keel 64x, d = 512 \|.*\| 64.0x \|.*\| \+0.50 \|", text)
    assert re.search(r"\| dense, d = 512 \| 0.001 \|.*\| -0.50 \|", text), "that the keel had no such run is said"
    assert runs["keel 64x, d = 512"].shape == WIDE
    assert runs["keel 64x, d = 512"].tokens == SHORT
    assert (tmp_path / "over_tokens.png").stat().st_size > 10_000


def test_tokens_and_time_to_the_loss_of_dense(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = {study.name: study for study in steps_to_loss()}
    keep(tmp_path, DENSE, [5.0, 4.0])
    for name, loss in (("dense, 1 ", 4.0), ("keel 32x, 1 ", 4.03), ("keel 32x, 1.1 ", 4.01), ("keel 32x, 1.25 ", 3.98)):
        keep(tmp_path, runs[f"{name}times the tokens"], [5.0, loss])
    seconds = {"dense": 1.0, "keel 32x": 0.9}
    times = Times(versions={}, runs={name: Timed(settings="") for name in seconds})
    for name, of_compute in seconds.items():
        sending = 99 if name == "dense" else 99 / 32
        times.runs[name].seconds.update({key(mbps): of_compute + (sending / mbps if mbps else 0) for mbps in RATES})
    (tmp_path / "step_seconds.json").write_bytes(msgspec.json.encode(times))
    report(tmp_path)
    text = capsys.readouterr().out
    assert "**1.15 times the tokens are enough.**" in text
    assert "## Steps to loss" not in text, "their rates fall otherwise than those of the run they would be beside"
    assert re.search(r"\| 1 \| 100.00 \| 99.0 % \| 3.994 \| 25.0 \| 24.5 \| 1.02 \| 21.8 \|", text)


CONTROL_LOSSES = {DENSE.name: (4.0, 5.0, 4.0), WHOLE.name: (3.9, 4.9, 4.0)} | {
    keel(16).name: (4.0, 4.998, 4.04),
    keel(32).name: (4.095, 4.949, 4.08),
}


def test_the_control_is_compared_in_one_precision():
    runs = list(control())
    assert len(runs) == 12
    assert {(run.compiled, run.autocast, run.tokens) for run in runs} == {(True, False, DENSE.tokens)}
    assert {run.name: run.projection.token_prior_window for run in runs} == {
        WHOLE.name: 4, keel(32).name: 4, keel(16).name: 4, DENSE.name: 1,
    }  # fmt: skip


def test_the_control_has_each_keel_against_dense_and_against_all_channels(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    keep(tmp_path, DENSE, [5.0, 4.4])
    for study in control():
        keep(tmp_path, study, [6.0, CONTROL_LOSSES[study.name][study.seed]])
    report(tmp_path)
    text = capsys.readouterr().out
    assert "| 0 | 4.0000 | 3.9000 | 4.0000 | 4.0950 | -2.50 | +0.00 | +2.37 | +2.56 | +5.00 |" in text
    assert "| 1 | 5.0000 | 4.9000 | 4.9980 | 4.9490 | -2.00 | -0.04 | -1.02 | +2.00 | +1.00 |" in text
    mean = "-1.50 (-2.50 … +0.00) | +0.32 (-0.04 … +1.00) | +1.12 (-1.02 … +2.37) | +1.85 (+1.00 … +2.56) | "
    assert f"| mean | 4.3333 | 4.2667 | 4.3460 | 4.3747 | {mean}+2.67 (+1.00 … +5.00) |" in text
    assert "Missing" not in text


def test_records_of_the_control_change_no_other_section(tmp_path, capsys):
    """A run of the control has the name of one in bfloat16, with which it must not be confused."""
    pytest.importorskip("matplotlib")
    keep(tmp_path, DENSE, [5.0, 4.0])
    keep(tmp_path, keel(32), [5.0, 4.04])
    report(tmp_path)
    before = capsys.readouterr().out
    for study in control():
        keep(tmp_path, study, [3.0, 2.0])
    report(tmp_path)
    after = capsys.readouterr().out
    others, others_after = (
        [section for section in text.split("\n## ") if not section.startswith("Control")] for text in (before, after)
    )
    assert len(others) > 1
    assert others_after == others
    assert len(read_results(tmp_path)) == 2


def test_missing_runs_of_the_control_are_named_in_place_of_a_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    keep(tmp_path, DENSE, [5.0, 4.0])
    for study in control():
        if not (study.name == WHOLE.name and study.seed) and not (study.name == DENSE.name and study.seed == 2):
            keep(tmp_path, study, [6.0, 5.0])
    report(tmp_path)
    text = capsys.readouterr().out
    assert f"Missing: {WHOLE.name} (seeds 1, 2); dense (seed 2)." in text
    assert "| seed | D | D+ |" not in text


def test_a_run_of_the_control_that_diverged_is_named(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    keep(tmp_path, DENSE, [5.0, 4.0])
    for study in control():
        failed = study.name == keel(32).name and study.seed == 1
        keep(tmp_path, study, [6.0, 5.0], ended="not_finite" if failed else "finished")
    report(tmp_path)
    assert "No table: diverged: keel 32x (seed 1)." in capsys.readouterr().out
