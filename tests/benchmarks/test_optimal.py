"""The pre-registered list: bytes, trainable counts and core-hours are what the page says."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.convergence.execute import settings_of
from benchmarks.convergence.study import DENSE as BF16
from benchmarks.convergence.study import trainable
from benchmarks.optimal.runs import (
    INT4,
    MORE_RATES,
    RATES,
    SEEDS,
    WIDTHS,
    all_runs,
    block_weights,
    channels,
    message_size,
    nbytes_per_token,
    share_run,
    study,
    tokens_of,
    tuning_run,
)
from tests.benchmarks.test_convergence import keep
from thinpipe.config.toml import differences
from thinpipe.models import build

PAGE = (Path(__file__).parents[2] / "benchmarks" / "optimal" / "PREREGISTRATION.md").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The list before there is any record."""
    return all_runs(tmp_path_factory.mktemp("no records"))


def test_channels_follow_from_bytes_with_ids_and_scales():
    assert {dim: (channels(dim, 16), channels(dim, 32)) for dim in WIDTHS} == {64: (10, 2), 96: (18, 6), 128: (26, 10)}
    for dim in WIDTHS:
        for ratio in (16, 32):
            width = channels(dim, ratio)
            assert nbytes_per_token(BF16, message_size(dim)) < ratio * nbytes_per_token(INT4, message_size(width + 1))


def test_keels_send_as_many_times_fewer_bytes_as_their_names_say(runs):
    keels = [run for run in runs if run.kind in ("K16", "K32") and run.question != "equal share"]
    assert len(keels) > 20
    for run in keels:
        ratio = study("D", run.dim, lr=1.0).nbytes_per_token / run.nbytes_per_token
        assert ratio == pytest.approx(float(run.kind[1:]), rel=0.03), run.name
        assert ratio >= float(run.kind[1:]), run.name
        stated = nbytes_per_token(INT4, message_size(run.projection.width))
        assert run.nbytes_per_token == stated, "the study counts the same bytes"


def test_all_models_of_a_width_train_as_many_numbers(runs):
    for run in runs:
        wanted = trainable(study("D", run.dim, lr=1.0).model)
        assert trainable(run.model) == pytest.approx(wanted, rel=1e-3), run.name


@pytest.mark.parametrize("dim", WIDTHS)
def test_weights_of_the_blocks_are_counted(dim):
    model = build(study("D", dim, lr=1.0).model.resolve(4096))
    matrices = [p.numel() for name, p in model.named_parameters() if "blocks." in name and p.dim() > 1]
    assert block_weights(dim) == sum(matrices)
    assert study("K32", dim, lr=1.0).steps * 16 * 256 == tokens_of(dim, 20) == 20 * sum(matrices)


def test_the_list_has_the_runs_and_core_hours_of_the_page(runs):
    by_question = {question: [run for run in runs if run.question == question] for question in
                   ("learning rate", "width", "boundaries", "equal share", "other methods")}  # fmt: skip
    rows = [*by_question.items(), ("all", runs)]
    assert sum(len(same) for same in by_question.values()) == len(runs)
    for question, same in rows:
        row = next(line for line in PAGE.splitlines() if re.match(rf"\| {question}\b", line))
        hours = sum(run.core_hours for run in same)
        assert row.endswith(f"| {len(same)} | {hours:.1f} |"), question
    assert 25 < sum(run.core_hours for run in runs) < 40


def test_the_page_has_the_widths_of_the_list():
    for dim in WIDTHS:
        cells = [
            f"{width} ({nbytes_per_token(BF16, message_size(dim)) / nbytes_per_token(INT4, message_size(width)):.2f})"
            for width in (channels(dim, 16), channels(dim, 32))
        ]
        run = study("D", dim, lr=1.0)
        facts = f"| {dim} | {len(SEEDS[dim])} | {block_weights(dim):,} | {run.tokens / 1e6:.2f} | {run.steps:,} | "
        assert facts + " | ".join(cells) + " |" in PAGE


def test_runs_of_a_width_differ_in_model_rate_and_seed_alone(runs):
    asked = ("model.projection", "model.hidden_dim", "model.subspace", "model.boundaries", "boundary.")
    for run in runs:
        dense = study("D", run.dim, lr=run.lr, seed=run.seed)
        if run.question == "learning rate":
            dense = tuning_run("D", run.lr)
        changed = differences(tomllib.loads(settings_of(dense)), tomllib.loads(settings_of(run)))
        assert [name for name in changed if not f"{name}.".startswith(asked)] == [], run.name


def test_rates_of_matrices_follow_the_width(runs):
    for run in runs:
        settings = tomllib.loads(settings_of(run))
        assert settings["optimizer"]["matrix_lr_factor"] == 64 / run.dim
        assert settings["data"]["path"].endswith("tuning" if run.question == "learning rate" else "reported")
        assert settings["validation"]["steps"] == 0, "all tokens of the books"


def test_each_model_takes_the_rate_that_is_best_on_the_tuning_books(tmp_path):
    losses = {"D": (5.0, 4.0, 4.5), "D+": (4.0, 5.0, 6.0), "K32": (6.0, 4.5, 4.0)}
    for model, each in losses.items():
        for rate, loss in zip(RATES, each, strict=True):
            keep(tmp_path, tuning_run(model, rate), [loss])
    runs = all_runs(tmp_path)
    beyond = [run for run in runs if run.question == "learning rate" and run.lr in MORE_RATES]
    assert {(run.kind, run.lr) for run in beyond} == {("D+", MORE_RATES[0]), ("K32", MORE_RATES[1])}
    keep(tmp_path, tuning_run("K32", MORE_RATES[1]), [3.9])
    of_width = [run for run in all_runs(tmp_path) if run.question != "learning rate"]
    rates = {"D": RATES[1], "D+": RATES[0], "K16": MORE_RATES[1], "K32": MORE_RATES[1], "row": RATES[1]}
    assert {(run.kind, run.lr) for run in of_width} == set(rates.items())


def test_a_rate_at_which_the_run_diverged_is_not_taken(tmp_path):
    for rate, ended in zip(RATES, ("finished", "finished", "not_finite"), strict=True):
        keep(tmp_path, tuning_run("D", rate), [5.0 - rate], ended=ended)
    assert {run.lr for run in all_runs(tmp_path) if run.kind == "D" and run.question == "width"} == {RATES[1]}


def test_the_keel_of_equal_share_has_the_share_of_the_widest():
    run, widest = share_run(0, 1.0), study("K32", WIDTHS[-1], lr=1.0)
    assert run.projection.width / run.dim == widest.projection.width / widest.dim
    assert replace(run, question="width", name="", projection=study("K32", 64, lr=1.0).projection) == replace(
        study("K32", 64, lr=1.0), name=""
    )
