"""`python -m benchmarks.step`: the statistics, the models it compares, and one tiny run through the real command."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.pairs import compare, median_interval, paired_ratio
from benchmarks.step.config import StepConfig
from benchmarks.step.peak_memory import MemoryJob, read_memory
from benchmarks.step.results import Growth
from benchmarks.step.training_step import TrainingStep
from benchmarks.step.variants import dense_variant, subspace_variants, with_count
from thinpipe.core.errors import UserError
from thinpipe.core.peak_memory import peak_resident_nbytes

TINY = StepConfig(dim=64, layers=1, vocab=512, tokens=32, seqs=(16, 32), threads=1)


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(6, 1, 1 - 2 / 2**6), (10, 2, 1 - 2 * 11 / 2**10), (20, 6, 1 - 2 * 21_700 / 2**20)],
)
def test_median_interval_takes_the_tabulated_order_statistics(count, rank, coverage):
    values = [float(value) for value in range(1, count + 1)]
    low, high, found = median_interval(values[::-1])
    assert (low, high) == (rank, count + 1 - rank)
    assert found == pytest.approx(coverage, abs=1e-12)


def test_median_interval_covers_the_median_as_often_as_it_says():
    draws = torch.rand(4000, 10, generator=torch.Generator().manual_seed(0)).exp().tolist()
    true_median = 2.718281828**0.5
    hits = sum(low <= true_median <= high for low, high, _ in map(median_interval, draws))
    assert hits / 4000 == pytest.approx(1 - 22 / 2**10, abs=0.01)


def test_too_few_values_have_no_interval():
    with pytest.raises(ValueError, match="too few"):
        median_interval([1.0] * 5)


def test_ratios_are_taken_pair_by_pair():
    noise = [1.0, 7.0, 2.0, 30.0, 1.5, 4.0]  # hits both halves of a pair alike, so it must cancel exactly
    ratio = paired_ratio([4 * each for each in noise], [3 * each for each in noise])
    assert (ratio.median, ratio.low, ratio.high) == (0.75, 0.75, 0.75)


def test_pairs_are_interleaved_and_alternate():
    order = []
    ratio = compare(lambda: order.append("a") or 2.0, lambda: order.append("b") or 1.0, pairs=6, warmup=1)
    assert "".join(order) == "ab" + "abba" * 3
    assert ratio.median == 0.5
    assert len(ratio.first_seconds) == 6


@pytest.mark.parametrize("config", [TINY, StepConfig(), StepConfig(dim=512, layers=2, vocab=4096)])
def test_trainable_counts(config):
    dense = dense_variant(config)
    assert dense.trainable == dense_count(dense)
    for same_shape, same_count in zip(*[iter(subspace_variants(config))] * 2, strict=True):
        assert same_shape.hidden_dim == dense.hidden_dim
        assert same_shape.trainable < dense.trainable
        assert same_count.trainable == pytest.approx(dense.trainable, rel=0.01)
        assert same_count.hidden_dim % 8 == 0
        assert same_count.width == same_shape.width


def dense_count(variant):
    block = 4 * variant.dim**2 + 3 * variant.dim * variant.hidden_dim + 2 * variant.dim
    return variant.layers * block + 2 * variant.vocab * variant.dim + variant.dim


def test_a_count_that_cannot_be_met_is_refused():
    variant = replace(dense_variant(TINY), width=1, vocab=1)
    half_a_step = 4 * (2 * 64 + 1)  # between two multiples of 8, more than 1 % from both
    with pytest.raises(UserError, match="larger dim or vocab"):
        with_count(variant, variant.trainable + half_a_step)


def test_optimizer_bytes_are_those_of_the_moments():
    variant = replace(dense_variant(TINY), width=8)
    step = TrainingStep(variant, device="cpu", bf16=False)
    step.set_batch(2, 16)
    assert step.optimizer_nbytes == 0
    before = step.forward().item()
    for _ in range(3):
        step.run()
    assert step.forward().item() < before
    element_wise = variant.trainable - 8 * (64 + 256 + 512)
    rows = 64 + 256 + 512  # o_proj, down_proj and the embedding: one second moment per row of the full-width matrix
    counts = len(list(step.model.parameters()))
    assert step.optimizer_nbytes == 4 * (2 * element_wise + 8 * rows + rows + counts)


def test_growth_is_a_slope_in_rows():
    flat = (100 * 2**20, 200 * 2**20, 400 * 2**20)
    growth = Growth(
        width=10,
        batch=2,
        seqs=(256, 512, 1024),
        dense_peaks_nbytes=flat,
        peaks_nbytes=flat,
        dense_activations_nbytes=flat,
        activations_nbytes=tuple(each + 2 * seq * 4 * 1024 for each, seq in zip(flat, (256, 512, 1024), strict=True)),
    )
    assert growth.activation_rows_per_token(1024) == pytest.approx(1.0)
    assert growth.grows(1024)
    assert not replace(growth, activations_nbytes=flat).grows(1024)


def test_memory_is_read_in_a_process_that_owes_nothing_to_its_parent():
    variant = replace(dense_variant(TINY), vocab=16384)
    weights_nbytes = 4 * variant.trainable
    ballast = torch.ones(64 * 2**20)  # 256 MiB in this process, which getrusage would show in the child as well
    job = MemoryJob(variant=variant, batch=1, seq=16, device="cpu", bf16=False, threads=1)
    reading = read_memory(job)
    assert ballast[0] == 1
    assert peak_resident_nbytes() > 256 * 2**20
    assert reading.optimizer_nbytes == pytest.approx(2 * weights_nbytes, rel=0.01)
    # Weights, gradients and two moments are nearly all of it: 33 MiB, less than the ballast by far.
    assert reading.peak_nbytes == pytest.approx(4 * weights_nbytes, rel=0.15)


def test_a_failing_memory_process_says_what_it_was_doing():
    job = MemoryJob(variant=dense_variant(TINY), batch=1, seq=16, device="no such device", bf16=False, threads=1)
    with pytest.raises(RuntimeError, match=r"memory of dense at 1 x 16 tokens failed with exit code 1"):
        read_memory(job)


@pytest.mark.long
def test_the_command_end_to_end(tmp_path):
    pytest.importorskip("matplotlib")
    flags = {"dim": 64, "layers": 1, "vocab": 512, "tokens": 32, "seqs": 32, "compressions": 100, "pairs": 6}
    flags |= {"threads": 1, "json": tmp_path / "step.json", "figure": tmp_path / "step.png"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.step", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    last_line = done.stdout.splitlines()[-1]
    assert (tmp_path / "step.json").read_text() == last_line + "\n"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    check_json(json.loads(last_line))


def check_json(result):
    assert result["bench"] == "step"
    assert result["config"]["tokens"] == 32
    assert result["versions"]["torch"] == torch.__version__
    assert result["threads"] == 1
    dense, same_shape, same_count = result["variants"]
    assert same_shape["optimizer_nbytes"] < dense["optimizer_nbytes"]
    assert same_count["trainable"] == pytest.approx(dense["trainable"], rel=0.01)
    assert [(entry["match"], entry["seq"], entry["batch"]) for entry in result["comparisons"]] == [
        ("shape", 32, 1),
        ("count", 32, 1),
    ]
    for entry in result["comparisons"]:
        time = entry["time"]
        assert 0 < time["low"] <= time["median"] <= time["high"]
        assert len(time["first_seconds"]) == len(time["second_seconds"]) == 6
        assert all(0 < seconds < 60 for seconds in time["first_seconds"])
        assert entry["peak_nbytes"] > 4 * same_shape["trainable"]
    (growth,) = result["growth"]
    assert growth["seqs"] == [32]
    assert growth["grows"] is False
    assert [target["name"] for target in result["targets"]] == ["step time, sequence 32", "optimiser memory"]
    time_target, optimizer_target = result["targets"]
    assert optimizer_target["reached"] is optimizer_target["certain"] is True
    assert time_target["certain"] is (result["comparisons"][0]["time"]["high"] <= 0.9)
