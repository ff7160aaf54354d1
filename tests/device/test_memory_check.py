"""A run that does not fit on a device with memory of its own is refused by the process that would have no room."""

import os
from dataclasses import replace

import pytest
import torch

from tests.device.sim import environment
from tests.warm import run_warm
from thinpipe.config.run import ParallelismConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.device import attention
from thinpipe.device.choice import ranks_on_device
from thinpipe.training.memory_check import check_on_device, device_budget, local_fit


def on_sim(config, degree):
    return replace(
        config,
        training=replace(config.training, device="sim"),
        parallelism=ParallelismConfig(pipeline_parallel_degree=degree, pipeline_parallel_microbatch_size=2),
    )


def test_free_memory_of_the_device_and_of_its_host(sim):
    budget = device_budget(torch.device("sim:1"))
    assert budget.place.startswith("sim:1 (")
    assert budget.free_nbytes == sim.mem_get_info(1)[0]
    assert budget.usable_nbytes == int(0.95 * budget.free_nbytes)
    assert budget.host_free_nbytes > 0


def test_a_device_without_a_fused_kernel_keeps_scores_and_needs_more(sim, run_config, monkeypatch):  # noqa: ARG001
    config, device = on_sim(run_config, 1), torch.device("sim:0")
    model = config.model.resolve(64)
    needed = {}
    for kernel in ("fused", "math"):
        monkeypatch.setattr(attention, "attention_kernel", lambda *_, kernel=kernel, **__: kernel)
        here, fit = local_fit(config, model, device)
        needed[kernel] = fit.memory(here).activations
    assert needed["math"] > needed["fused"]


def test_processes_share_a_device_as_it_is_chosen(sim):  # noqa: ARG001
    device = torch.device("sim:1")
    assert ranks_on_device("auto", device, range(4, 9)) == (5, 7)
    assert ranks_on_device("sim:1", device, range(4, 9)) == (4, 5, 6, 7, 8)
    assert ranks_on_device("cpu", torch.device("cpu"), range(2)) == (0, 1)


def test_a_process_counts_all_that_share_its_device(sim, run_config, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "3"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sim, "mem_get_info", lambda device=None: (1000, 2000))  # noqa: ARG005
    config = on_sim(run_config, 3)
    with pytest.raises(UserError, match=r"needs .* of memory on sim:1 "):
        check_on_device(config)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"memory for 2 processes on sim:0 .* Python and torch 500 MB"):
        check_on_device(config)


def test_a_launched_process_without_room_names_itself_and_its_device(sim_library, run_config, tmp_path):  # noqa: ARG001
    (tmp_path / "run.toml").write_text(dump_toml(on_sim(run_config, 2)))
    variables = os.environ | environment(SIM_MEMORY_BYTES=50_000)
    done = run_warm("thinpipe", "train", tmp_path / "run.toml", timeout=600, env=variables)
    assert done.returncode == 2
    assert "thinpipe: process " in done.stderr
    assert "of memory on sim:" in done.stderr
    assert "what would make it fit" in done.stderr
    assert not (run_config.job.dump_folder / "checkpoints").exists()
