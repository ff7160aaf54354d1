"""The study compares like with like, keeps what it measured, repeats nothing and hides no failure."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.convergence.clock import RATES as LINK_RATES
from benchmarks.convergence.clock import Timed, Times, fewest_tokens_to, key, mean_curve, report_clock, tokens_to
from benchmarks.convergence.execute import current_settings, execute, folder_lock, is_done, result_path, settings_of
from benchmarks.convergence.report import report
from benchmarks.convergence.results import Dense, read_results
from benchmarks.convergence.runs import DENSE, LONG, RATES, ROW, all_runs, at_the_edge, best_rates
from benchmarks.convergence.study import TOKENS_PER_STEP, trainable
from thinpipe.config.run import LRSchedulerConfig, RunConfig
from thinpipe.config.toml import differences, from_table
from thinpipe.core.errors import UserError

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


def keep(output, study, losses, *, ended="finished"):
    """A made-up record: these validation losses at equal distances."""
    path = result_path(study, output)
    path.parent.mkdir(parents=True, exist_ok=True)
    points = [
        {"tokens": study.tokens * number // len(losses), "loss": loss, "bits_per_byte": loss / 2}
        for number, loss in enumerate(losses, 1)
    ]
    kept = {
        "question": study.question, "name": study.name, "lr": study.lr, "seed": study.seed, "tokens": study.tokens,
        "boundaries": len(study.cuts), "bytes_per_token": study.nbytes_per_token, "trainable": 1, "ended": ended,
        "settings": settings_of(study), "validations": points,
    }  # fmt: skip
    path.write_text(json.dumps(kept))


def test_runs_of_one_ratio_send_as_many_bytes(tmp_path):
    for study in all_runs(tmp_path):
        named = re.search(r"\b(\d+)x", study.name)
        if named:
            ratio = DENSE.nbytes_per_token / study.nbytes_per_token
            assert ratio == pytest.approx(float(named[1]), rel=0.06), study.name


def test_a_matched_model_trains_as_much_as_the_dense_one():
    dense, same_shape = trainable(DENSE.model), trainable(ROW.model)
    assert same_shape < 0.8 * dense
    assert trainable(replace(ROW, matched=True).model) == pytest.approx(dense, rel=1e-3)


def test_runs_differ_in_what_they_ask_and_in_nothing_else(tmp_path):
    """Of runs with as many tokens: model, boundary, basis, rate and seed."""
    asked = ("model.", "boundary.", "basis.", "optimizer.lr", "optimizer.second_moment", "debug.seed")
    for study in all_runs(tmp_path):
        base = tomllib.loads(settings_of(replace(DENSE, tokens=study.tokens)))
        changed = differences(base, tomllib.loads(settings_of(study)))
        assert [name for name in changed if not f"{name}.".startswith(asked) and name not in asked] == [], study.name


def test_rates_come_from_records_and_an_edge_is_told(tmp_path):
    for rate, loss in zip(RATES["row"], (5.0, 4.0, 4.5), strict=True):
        keep(tmp_path, replace(ROW, lr=rate), [loss])
    for rate, loss in zip(RATES["dense"], (4.0, 4.1, 4.2), strict=True):
        keep(tmp_path, replace(DENSE, lr=rate), [loss])
    best = best_rates(tmp_path)
    assert best["row"] == RATES["row"][1]
    assert best["dense"] == RATES["dense"][0]
    assert at_the_edge(best) == ["dense"]
    assert {s.lr for s in all_runs(tmp_path) if s.kind == "row" and s.question == "pieces"} == {RATES["row"][1]}


@pytest.mark.long
@pytest.mark.programs
def test_a_run_leaves_a_record_and_is_not_repeated(tokens, tmp_path, capsys):
    study, dense = (replace(kind, tokens=2 * TOKENS_PER_STEP) for kind in (ROW, DENSE))
    output, work = tmp_path / "output", tmp_path / "work"
    assert execute([study, dense], tokens, work, output, side_by_side=2) == 0
    kept = json.loads(result_path(study, output).read_text())
    assert [point["tokens"] for point in kept["validations"]] == [2 * TOKENS_PER_STEP]
    assert len(kept["training_loss"]) == 2
    assert [path.name for path in work.iterdir()] == [".lock"]
    assert not any(result.diverged for result in read_results(output))
    capsys.readouterr()
    execute([study, dense], tokens, work, output, side_by_side=2)
    assert capsys.readouterr().out.startswith("0 of 2 runs to do")


@pytest.mark.long
def test_a_branch_goes_on_from_its_trunk_as_if_both_were_one_run(tokens, tmp_path):
    level = LRSchedulerConfig(warmup_steps=1, decay_type="linear", min_lr_factor=1.0)
    whole, trunk = (replace(DENSE, tokens=n * TOKENS_PER_STEP, schedule=level) for n in (4, 2))
    branch = replace(whole, trunk=trunk, name="branch")
    assert execute([branch, trunk, whole], tokens, tmp_path / "work", tmp_path, side_by_side=2) == 0
    kept, of_one_run = (json.loads(result_path(study, tmp_path).read_text()) for study in (branch, whole))
    assert kept["training_loss"] == of_one_run["training_loss"][2:]
    assert kept["validations"] == of_one_run["validations"]


def test_a_record_of_other_settings_is_not_this_run(tmp_path):
    keep(tmp_path, ROW, [5.0])
    assert is_done(ROW, tmp_path)
    assert not is_done(replace(ROW, cuts=(4,)), tmp_path)  # of the same name


def test_a_run_that_fails_is_told_and_leaves_no_record(tmp_path, capsys):
    study = replace(ROW, tokens=2 * TOKENS_PER_STEP)
    assert execute([study], tmp_path / "nowhere", tmp_path / "work", tmp_path, side_by_side=1) == 1
    assert "nowhere" in capsys.readouterr().out
    assert not result_path(study, tmp_path).exists()


def test_two_do_not_work_in_one_folder(tmp_path):
    with folder_lock(tmp_path), pytest.raises(UserError, match="another study"), folder_lock(tmp_path):
        pass


def test_the_gap_is_to_the_best_dense_run_of_the_same_seed(tmp_path):
    keep(tmp_path, DENSE, [6.0, 5.0])
    keep(tmp_path, replace(DENSE, lr=3e-3), [6.0, 4.0])
    keep(tmp_path, replace(DENSE, seed=1), [6.0, 3.0])
    keep(tmp_path, ROW, [6.6, 4.4])
    results = read_results(tmp_path)
    dense = Dense(results)
    thin = next(result for result in results if result.name == ROW.name)
    assert dense.gap(thin).percent == pytest.approx(10)
    assert [percent for _, percent in dense.percent_over_tokens(thin)] == pytest.approx([10, 10])


def test_the_report_tells_of_a_run_that_diverged(tmp_path, capsys):
    keep(tmp_path, DENSE, [6.0, 5.0])
    keep(tmp_path, ROW, [6.0], ended="not_finite")
    keep(tmp_path, replace(ROW, seed=1), [6.0, 5.5])
    keep(tmp_path, replace(DENSE, seed=1), [6.0, 5.0])
    report(tmp_path)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {ROW.name} |")]
    assert any("diverged" in row for row in rows)
    assert any("+10.00" in row for row in rows)
    assert (tmp_path / "pareto.png").stat().st_size > 10_000


def test_the_report_has_the_gap_in_three_units_and_over_tokens(tmp_path, capsys):
    for seed, loss in ((0, 5.5), (1, 6.0)):
        keep(tmp_path, replace(DENSE, seed=seed), [6.0, 5.0])
        keep(tmp_path, replace(ROW, seed=seed), [6.0, loss])
    keep(tmp_path, replace(ROW, question="pieces", name="Gaussian table"), [6.0, 5.2])
    report(tmp_path)
    page = capsys.readouterr().out
    assert "+15.00 (+10.00 … +20.00) | +0.750 (+0.500 … +1.000) | +0.375 (+0.250 … +0.500) |" in page
    assert f"| {ROW.name} | 2 | +0.00 %, +0.000, +0.000 | +15.00 %, +0.750, +0.375 |" in page
    assert (tmp_path / "pieces.png").stat().st_size > 10_000


def test_time_to_a_loss_lies_between_two_validations():
    curve = [(0, 6.0), (100, 5.0), (200, 4.0)]
    assert tokens_to(5.5, curve) == 50
    assert tokens_to(4.0, curve) == 200
    assert tokens_to(3.9, curve) is None
    assert tokens_to(7.0, curve) == 0
    assert fewest_tokens_to(4.0, [curve, [(0, 6.0), (50, 4.0)]]) == 50


def test_the_clock_says_where_dense_overtakes(tmp_path):
    keep(tmp_path, replace(DENSE, tokens=LONG), [6.0, 5.0, 4.0])
    keep(tmp_path, replace(ROW, tokens=LONG), [6.0, 5.5, 5.0])
    (slow, fast), rates = ({"10": 4.0, "20": 1.2}, {"10": 1.0, "20": 1.0}), ("unlimited", "50", "80", "200")
    times = Times(
        versions={},
        runs={
            DENSE.name: Timed(settings="", seconds=slow | dict.fromkeys(rates, 1.0)),
            ROW.name: Timed(settings="", seconds=fast | dict.fromkeys(rates, 1.0)),
        },
    )
    (tmp_path / "step_seconds.json").write_bytes(msgspec.json.encode(times))
    page = report_clock(tmp_path)
    assert f"dense overtakes {ROW.name} between 10 and 20 Mbps" in page
    assert (tmp_path / "clock.png").stat().st_size > 10_000


def test_the_curve_of_several_seeds_is_their_mean():
    assert mean_curve([[(1, 6.0), (2, 4.0)], [(1, 4.0), (2, 3.0)]]) == [(1, 5.0), (2, 3.5)]


def test_the_clock_pairs_seeds(tmp_path):
    """Each seed has the loss of its own worst run to come to; a seed that not all have does not count."""
    pytest.importorskip("matplotlib")
    half = LONG / 2
    for seed, (of_dense, of_row) in enumerate((([6.0, 4.0], [6.0, 5.0]), ([4.0, 2.0], [5.0, 2.5]), ([9.0, 8.0], None))):
        keep(tmp_path, replace(DENSE, tokens=LONG, seed=seed), of_dense)
        if of_row:
            keep(tmp_path, replace(ROW, tokens=LONG, seed=seed), of_row)
    seconds = {key(mbps): 1.0 for mbps in LINK_RATES}
    times = Times(versions={}, runs={name: Timed(settings="", seconds=seconds) for name in (DENSE.name, ROW.name)})
    (tmp_path / "step_seconds.json").write_bytes(msgspec.json.encode(times))
    page = report_clock(tmp_path)
    steps = (half + half / 2 + half + half * 0.75) / 2 / TOKENS_PER_STEP  # to 5.0 and to 2.5, on straight lines
    assert f"| dense | {steps / 60:,.1f} |" in page
    assert f"| {ROW.name} | {LONG / TOKENS_PER_STEP / 60:,.1f} |" in page
    assert "over seeds 0, 1;" in page


@pytest.mark.parametrize("study", ["convergence", "own", "finetune"])
def test_committed_records_are_readable_under_the_names_of_today(study):
    paths = sorted((COMMITTED / study / "records").glob("*.json"))
    assert paths
    for path in paths:
        table = tomllib.loads(json.loads(path.read_text())["settings"])
        config = from_table(current_settings(table), RunConfig, where=path.name)
        states = table["boundary"]["states"]
        assert config.boundary.states.feedback == states["memory" if "memory" in states else "feedback"]
        if "neck" in table["model"]:
            assert config.model.projection.token_prior_rank == table["model"]["neck"]["anchor_rank"]


def test_settings_of_today_keep_their_names():
    table = tomllib.loads(settings_of(ROW))
    assert current_settings(table) == table


def test_a_committed_record_is_not_made_again():
    output = COMMITTED / "convergence"
    done = {result_path(study, output) for study in all_runs(output) if is_done(study, output)}
    assert done == set((output / "records").glob("*.json"))
