"""The study compares like with like, keeps what it measured and repeats nothing."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.convergence.clock import tokens_to
from benchmarks.convergence.execute import execute, result_path
from benchmarks.convergence.results import Dense, read_results
from benchmarks.convergence.runs import BASE, ROW, RUNS
from benchmarks.convergence.study import TOKENS_PER_STEP, trainable
from tests.train.conftest import tokens  # noqa: F401  a fixture


def test_runs_of_one_ratio_send_as_many_bytes() -> None:
    for study in RUNS:
        named = re.search(r"\b(\d+)x", study.name)
        if named:
            ratio = BASE.nbytes_per_token / study.nbytes_per_token
            assert ratio == pytest.approx(float(named[1]), rel=0.06), study.name


def test_a_matched_model_trains_as_much_as_the_dense_one() -> None:
    dense, same_shape = trainable(BASE.model), trainable(ROW.model)
    assert same_shape < 0.8 * dense
    assert trainable(replace(ROW, matched=True).model) == pytest.approx(dense, rel=1e-3)


def test_runs_share_everything_but_what_they_ask(tmp_path) -> None:
    configs = [study.config(tmp_path, tmp_path) for study in RUNS]
    assert len({(config.training.global_batch_size, config.training.seq_len) for config in configs}) == 1
    assert len({config.optimizer.weight_decay for config in configs}) == 1
    assert {config.validation.steps for config in configs} == {20}


def test_a_run_leaves_a_record_and_is_not_repeated(tokens, tmp_path, capsys) -> None:  # noqa: F811
    study = replace(ROW, question="test", tokens=2 * TOKENS_PER_STEP)
    dense = replace(BASE, question="test", tokens=2 * TOKENS_PER_STEP)
    output, work = tmp_path / "output", tmp_path / "work"
    assert execute([study, dense], tokens, work, output, side_by_side=2) == 0
    kept = json.loads(result_path(study, output).read_text())
    assert [point["tokens"] for point in kept["validations"]] == [2 * TOKENS_PER_STEP]
    assert len(kept["training_loss"]) == 2
    assert not list(work.iterdir())
    results = read_results(output)
    gap = Dense(results).gap(next(result for result in results if result.name == study.name))
    assert gap.nats == pytest.approx(kept["validations"][-1]["loss"] - Dense(results).of(results[0]).loss)
    capsys.readouterr()
    execute([study, dense], tokens, work, output, side_by_side=2)
    assert capsys.readouterr().out.startswith("0 of 2 runs to do")


def test_a_run_that_fails_is_told_and_leaves_no_record(tmp_path, capsys) -> None:
    study = replace(ROW, question="test", tokens=2 * TOKENS_PER_STEP)
    assert execute([study], tmp_path / "nowhere", tmp_path / "work", tmp_path, side_by_side=1) == 1
    assert "nowhere" in capsys.readouterr().out
    assert not result_path(study, tmp_path).exists()


def test_time_to_a_loss_lies_between_two_validations() -> None:
    curve = [(0, 6.0), (100, 5.0), (200, 4.0)]
    assert tokens_to(5.5, curve) == 50
    assert tokens_to(4.0, curve) == 200
    assert tokens_to(3.9, curve) is None
