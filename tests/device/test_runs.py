"""Runs of several processes on the device `sim`, over gloo, over emulated links and with a hub, against one process on
it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.device.sim import environment
from tests.device.test_copies import WAITS
from tests.device.transfers import measure
from tests.programs import files_of, steps_of, train_with_hub
from tests.train.test_processes import ENVIRONMENT, finish, placed, start
from tests.transport.processes import free_port, group_environment
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.link import LinkConfig
from thinpipe.training.trainer import Trainer

LINK = {"link": LinkConfig(up="200mbps", down="200mbps", latency="1ms")}


@pytest.fixture
def run_config(run_config):
    """Of four segments and four micro-batches, enough for four processes."""
    parallelism = replace(run_config.parallelism, pipeline_parallel_microbatch_size=2)
    return replace(run_config, model=replace(run_config.model, boundaries=(1, 2, 3)), parallelism=parallelism)


def on(device, config, name="alone"):
    config = placed(config, config.parallelism.pipeline_parallel_degree, name)
    return replace(config, training=replace(config.training, device=device))


def numbers(config):
    """Loss and gradient norm of every step."""
    return [(step.loss, step.grad_norm) for step in steps_of(config)]


@pytest.fixture
def expected(sim, run_config):  # noqa: ARG001
    config = on("sim", run_config)
    Trainer(config).train()
    assert len(numbers(config)) == 12
    return numbers(config)


@pytest.mark.parametrize(
    ("degree", "changes"),
    [*(pytest.param(*case, marks=pytest.mark.long) for case in ((2, {}), (4, {}), (2, LINK))), (4, LINK)],
    ids=["two", "four", "two over links", "four over links"],
)
def test_processes_on_the_device_equal_one(degree, changes, expected, run_config):
    config = on("sim", replace(placed(run_config, degree, "any"), **changes), "several")
    code, printed = finish(start(config, ENVIRONMENT | environment()))
    assert code == 0, printed
    assert numbers(config) == expected


@pytest.mark.parametrize(
    "devices",
    [("sim", "cpu"), *(pytest.param(devices, marks=pytest.mark.long) for devices in (("sim", "sim"), ("sim",) * 4))],
    ids=" and ".join,
)
def test_peers_of_a_hub_equal_one_process(devices, expected, run_config, programs):
    """`sim` computes with the kernels of the CPU, so that even peers of both kinds are equal."""
    config = placed(run_config, 1, "hub")
    train_with_hub(programs, config, devices, environment())
    assert numbers(config) == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 21))
def test_the_order_in_which_threads_meet_changes_nothing(seed, expected, run_config):
    """Copies and synchronisations take random times, in both processes the same."""
    config = on("sim", placed(run_config, 2, "any"), "timed")
    code, printed = finish(start(config, ENVIRONMENT | environment(SIM_SEED=seed)))
    assert code == 0, printed
    assert numbers(config) == expected


@pytest.mark.usefixtures("sim_library")
def test_the_training_thread_waits_for_its_device_at_the_end_of_a_step_only():
    """For losses, norms of gradients and norms of messages; each message is waited for by the thread that sends it."""
    case = "llama-subspace-fp32-fp32"
    for counts in (process[case] for process in measure(case)):
        assert (
            counts["synchronize_event"] == counts["to_host_non_blocking"] == counts["to_device_non_blocking"] == [1, 0]
        )
        waits = {name: count for name, count in counts.items() if name in WAITS}
        assert all(each == 0 for each, _ in waits.values()), waits
        assert sum(rest for _, rest in waits.values()) == 3


def test_a_stage_on_the_cpu_and_one_on_the_device(expected, run_config):
    """`sim` computes with the kernels of the CPU, so even these are equal; cards would agree within a band."""
    port = free_port()
    configs = [on(device, placed(run_config, 2, "any"), device) for device in ("cpu", "sim")]
    hosts = [
        start(config, ENVIRONMENT | environment() | group_environment(rank, 2, port=port))
        for rank, config in enumerate(configs)
    ]
    for host in hosts:
        code, printed = finish(host)
        assert code == 0, printed
    assert numbers(configs[0]) == expected


def test_processes_need_no_float64_on_the_device(expected, run_config):
    """Steps, basis updates, validation and checkpoints, where creating a float64 tensor on the device raises."""
    config = on("sim", placed(run_config, 2, "any"), "no-float64")
    code, printed = finish(start(config, ENVIRONMENT | environment(SIM_NO_F64=1)))
    assert code == 0, printed
    assert numbers(config) == expected


def test_dropout_and_rounding_are_those_of_the_cpu(gpt2_config):
    config = replace(gpt2_config, boundary=BoundaryConfig(forward="int8", backward="int4"))
    whole, split = on("cpu", config, "whole"), on("sim", placed(config, 2, "any"), "split")
    Trainer(whole).train()
    code, printed = finish(start(split, ENVIRONMENT | environment(SIM_NO_F64=1)))
    assert code == 0, printed
    assert numbers(split) == numbers(whole)


def offloaded(config):
    return replace(config, training=replace(config.training, offload="optimizer"))


def test_processes_with_their_state_on_the_host_equal_one_without(expected, run_config):
    config = offloaded(on("sim", placed(run_config, 2, "any"), "offloaded"))
    code, printed = finish(start(config, ENVIRONMENT | environment(SIM_NO_F64=1)))
    assert code == 0, printed
    assert numbers(config) == expected
    assert files_of(config, 12) == files_of(on("sim", run_config), 12)


@pytest.mark.parametrize("devices", [("sim", "sim"), ("sim", "cpu"), ("cpu", "sim")], ids=" to ".join)
@pytest.mark.parametrize("first", [True, False], ids=["with offload first", "without offload first"])
def test_a_run_goes_on_with_its_state_elsewhere(devices, first, expected, run_config):
    """A checkpoint does not tell where the optimiser's state was."""
    whole, resumed = (on(device, run_config, f"{number}-on-{device}") for number, device in enumerate(devices))
    whole, resumed = (offloaded(whole), resumed) if first else (whole, offloaded(resumed))
    Trainer(whole).train()
    place = Path("checkpoints/step-00000004")
    shutil.copytree(whole.job.dump_folder / place, resumed.job.dump_folder / place)
    Trainer(resumed).train()
    assert numbers(resumed) == expected[4:]
    assert files_of(resumed, 12) == files_of(whole, 12)


@pytest.mark.parametrize("devices", [("sim", "cpu"), ("cpu", "sim")], ids=" to ".join)
def test_a_run_goes_on_on_the_other_device(devices, expected, run_config):
    whole, resumed = (on(device, run_config, f"on-{device}") for device in devices)
    Trainer(whole).train()
    place = Path("checkpoints/step-00000004")
    shutil.copytree(whole.job.dump_folder / place, resumed.job.dump_folder / place)
    Trainer(resumed).train()
    assert numbers(resumed) == expected[4:]
