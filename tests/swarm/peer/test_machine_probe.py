"""What a machine says of itself."""

import time
from dataclasses import replace

import psutil
import pytest
import torch

from thinpipe.config.precision import RECIPES
from thinpipe.config.run import RunConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.device.host import _container_nbytes
from thinpipe.swarm.peer.machine_probe import measure_machine
from thinpipe.training.matmul_speed import measure_flops
from thinpipe.training.memory_check import device_budget

CPU = torch.device("cpu")
CONFIG = RunConfig(training=TrainingConfig(device="cpu", global_batch_size=4))


@pytest.mark.parametrize("precision", ["auto", "bf16-mixed"])
def test_a_machine_is_measured(precision):
    config = replace(CONFIG, training=replace(CONFIG.training, precision=precision))
    report = measure_machine(config, dim=128, heads=(4, 2, 32), seconds=0.5)
    assert report.device
    assert report.attention == "fused"
    assert report.threads == torch.get_num_threads()
    assert 0 < report.flops < 1e14
    assert 0 < report.memory_nbytes < psutil.virtual_memory().total


@pytest.mark.quiet
def test_flops_are_those_of_a_product_of_this_size():
    found = measure_flops(CPU, tokens=512, dim=512, recipe=RECIPES["fp32"], seconds=0.5)
    left, right = torch.randn(512, 512), torch.randn(512, 2048)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    alone = 2 * 512 * 512 * 2048 / best
    assert 0.4 * alone < found < 1.5 * alone  # forward and backward, with what autograd adds, on a shared machine


@pytest.mark.quiet
def test_a_small_and_a_large_model_take_the_time_that_was_given():
    began = time.monotonic()
    measure_machine(CONFIG, dim=128, heads=(4, 2, 32), seconds=0.5)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    measure_flops(CPU, tokens=100_000, dim=1024, recipe=RECIPES["fp32"], seconds=0.5)
    assert time.monotonic() - began < 8


def test_the_owner_may_limit_memory():
    budget = device_budget(CPU)
    assert budget.offered_nbytes(1_000_000) == 1_000_000
    assert budget.offered_nbytes(1 << 60) == budget.offered_nbytes() == pytest.approx(0.8 * budget.free_nbytes)
    with pytest.raises(UserError, match="leave it out"):
        budget.offered_nbytes(0)


def test_a_container_may_limit_memory(tmp_path):
    assert _container_nbytes(tmp_path) == float("inf")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_nbytes(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("5000\n")
    assert _container_nbytes(tmp_path) == 4000
