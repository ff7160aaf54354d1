"""`thinpipe selftest` on the device `sim`: it passes there, and finds and names faults that are planted in thinpipe."""

import gc
import json
import os
import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.mutations import all_mutations
from tests.device.planted_faults import LAW_OFF, MATMUL_OFF, plant, run_selftest
from tests.device.sim import environment
from tests.warm import run_warm
from thinpipe.boundary.formats import FORMATS, FloatFormat
from thinpipe.device import memory
from thinpipe.device.choice import choose_device
from thinpipe.device.memory import MemoryPeak
from thinpipe.selftest import copies, kernels, speed, steps
from thinpipe.selftest.boundaries import check_boundaries, methods
from thinpipe.selftest.check import Subject
from thinpipe.selftest.kernels import check_kernels, check_random_numbers
from thinpipe.selftest.steps import Reference, check_repeats, check_steps

pytestmark = pytest.mark.usefixtures("sim_library")
OPERATIONS, FEW_STEPS = "operations in float32", "steps in fp32"


@pytest.fixture
def subject(sim, tmp_path):  # noqa: ARG001
    return Subject(choose_device("sim"), tmp_path, quick=True, sustained_seconds=0)


def states(folder):
    found = json.loads((folder / "report" / "selftest.json").read_text())
    return {check["finding"]["what"]: check["finding"]["state"] for check in found["checks"]}


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"SIM_NO_F64": 1, "SIM_RACES": 0}, marks=pytest.mark.long)], ids=str
)
def test_it_passes(tmp_path, settings):
    variables = os.environ | environment(**settings) | {"COLUMNS": "400"}
    arguments = ("selftest", "--device", "sim", "--quick", "--output", tmp_path / "report")
    done = run_warm("thinpipe", *arguments, timeout=800, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(states(tmp_path).values()) <= {"ok", "warning"}  # speed depends on what else the machine does
    assert "a copy without a wait was noticed" in done.stdout
    assert "equal those of one process in every bit" in done.stdout


def test_a_wrong_matrix_product_is_named(tmp_path):
    plant(tmp_path, ("device/choice.py", MATMUL_OFF))
    done = run_selftest(tmp_path, OPERATIONS, FEW_STEPS)
    assert done.returncode == 1, done.stdout + done.stderr
    wanted = f'Do not set training.precision = "fp32", because {OPERATIONS}: matrix product is wrong by 2.4e-04'
    assert wanted in done.stdout
    assert states(tmp_path) == {OPERATIONS: "problem", FEW_STEPS: "problem"}


def test_a_memory_law_off_by_30_percent_is_named(tmp_path):
    plant(tmp_path, ("planning/segment_costs.py", LAW_OFF))
    done = run_selftest(tmp_path, "memory law")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "Do not rely on memory figures of `plan` and of hubs, because memory law: the memory law is off" in done.stdout
    )


MUTATIONS = [mutation for mutation in all_mutations() if mutation.module == "device/host_copies.py"]


@pytest.mark.parametrize(
    "mutation", [MUTATIONS[0], *(pytest.param(one, marks=pytest.mark.long) for one in MUTATIONS[1:])], ids=str
)
def test_a_copy_without_its_wait_is_named(tmp_path, mutation):
    """Whichever of the statements that order copies is missing."""
    plant(tmp_path, mutation)
    done = run_selftest(tmp_path, "copies", "offload")
    assert done.returncode == 1, done.stdout + done.stderr
    offload = (
        'Do not set training.offload = "optimizer", because offload: (a copy .* does not wait|.* race on the device)'
    )
    messages = "Do not join a hub or start several processes, because copies: a copy to the (host|device) does not wait"
    assert re.search(f"{offload}|{messages}", done.stdout)


@pytest.mark.parametrize("text", ["self._done.synchronize()", "self._done.record(stream)"])
@pytest.mark.long
def test_a_copy_without_its_wait_is_found_by_its_bytes(tmp_path, text):
    """On a device that does not watch for races."""
    plant(tmp_path, next(mutation for mutation in MUTATIONS if mutation.text == text))
    done = run_selftest(tmp_path, "copies", SIM_RACES=0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bytes are wrong" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "problems"),
    [
        (("device/choice.py", MATMUL_OFF), {OPERATIONS, FEW_STEPS, "boundary methods"}),
        (("planning/segment_costs.py", LAW_OFF), {"memory law"}),
        (MUTATIONS[0], {"copies", "two processes"}),
    ],
    ids=["wrong matrix product", "memory law", "copy without a wait"],
)
def test_a_whole_test_finds_the_fault_and_what_depends_on_it(tmp_path, fault, problems):
    """Messages of low rank are decoded by a matrix product."""
    plant(tmp_path, fault)
    done = run_selftest(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name for name, state in states(tmp_path).items() if state == "problem"} == problems


def test_every_operation_is_needed(subject, monkeypatch):
    """An operation that gives slightly other numbers on the device is named, whichever it is."""
    for name, (function, shapes) in kernels.KERNELS.items():

        def off(*inputs, function=function):
            return function(*inputs) * (1 + 1e-4 * (inputs[0].device.type == "sim"))

        monkeypatch.setitem(kernels.KERNELS, name, (off, shapes))
        finding, _ = check_kernels("operations", subject, dtype=torch.float32)
        assert finding.state == "problem"
        assert finding.text.startswith(f"{name} is wrong by")
        monkeypatch.setitem(kernels.KERNELS, name, (function, shapes))


def test_an_operation_that_the_device_lacks_is_named(subject, monkeypatch):
    def missing(x):
        if x.device.type == "sim":
            raise NotImplementedError("aten::silu is not there\nmore")
        return x

    monkeypatch.setitem(kernels.KERNELS, "SiLU", (missing, ((3, 4),)))
    finding, figures = check_kernels("operations", subject, dtype=torch.float32)
    assert (finding.state, finding.text) == ("problem", "SiLU stopped: NotImplementedError: aten::silu is not there")
    assert len(figures) == len(kernels.KERNELS) - 1


def test_every_method_of_the_registries_is_there():
    names = [name for name, _, _ in methods()]
    assert len(names) == len(set(names)) == 2 * 4 + 3 * 4 + 1


def test_a_message_of_other_bytes_is_named(subject, monkeypatch):
    """Token ids, the rest of the bytes, do not go through the format."""

    class Off(FloatFormat):
        def encode(self, values_NW, uniform=None):
            rows = super().encode(values_NW, uniform)
            return rows + (1 if values_NW.device.type == "sim" else 0)

    monkeypatch.setitem(FORMATS, "bf16", Off(torch.bfloat16, type("Row", (), {"nbytes": FORMATS["bf16"].row_nbytes})))
    finding, figures = check_boundaries("boundary methods", subject)
    assert finding.state == "problem"
    assert "none bf16: 99.19% of the bytes differ; subspace bf16:" in finding.text
    assert figures["none fp32"] == 0


def test_random_numbers_of_another_kind_are_found(subject, monkeypatch):
    right = kernels.uniform
    monkeypatch.setattr(kernels, "uniform", lambda like, *words: right(like, *words, like.device.type))
    finding, figures = check_random_numbers("random numbers", subject)
    assert finding.state == "problem"
    assert figures["different"] > 1_000_000


def test_a_device_that_does_not_repeat_itself_is_found(subject, monkeypatch):
    """With a promise of deterministic algorithms it is a problem, without one a warning."""
    numbers = iter(range(100))
    monkeypatch.setattr(steps, "train", lambda *_: next(numbers))
    assert check_repeats("repeated steps", subject)[0].state == "problem"
    subject.__dict__["is_deterministic"] = False
    assert check_repeats("repeated steps", subject)[0].state == "warning"


@pytest.mark.parametrize(("off", "state"), [(0.0, "ok"), (2e-4, "problem"), (float("nan"), "problem")])
def test_losses_outside_of_their_band_are_found(subject, monkeypatch, off, state):
    right = [(4.0 - step / 10, 1.0) for step in range(20)]
    monkeypatch.setattr(steps, "train", lambda *_: ([*right[:-1], (right[-1][0] + off, 1.0)], ""))
    reference = Reference()
    reference._numbers[steps.QUICK_STEPS] = right
    assert check_steps(FEW_STEPS, subject, recipe="fp32", reference=reference)[0].state == state


def test_copies_that_prove_nothing_say_so(subject, monkeypatch):
    """If a copy without a wait has the right bytes, so would wrong code."""
    monkeypatch.setattr(copies, "_without_wait", lambda _device: [copies._message(0)])
    finding, _ = copies.check_copies("copies", subject)
    assert finding.state == "not checked"


@pytest.mark.parametrize(("factor", "state"), [(1.0, "ok"), (0.7, "warning")])
def test_the_memory_law_of_a_recipe_is_judged(subject, monkeypatch, factor, state):
    predicted = speed.predicted_nbytes
    monkeypatch.setattr(speed, "predicted_nbytes", lambda *given: [factor * nbytes for nbytes in predicted(*given)])
    finding, figures = speed.check_recipe("recipe bf16", subject, recipe="bf16")
    assert finding.state == state, finding.text
    assert figures["memory"] == pytest.approx(factor, rel=0.15)
    assert subject.calibration.flops["bf16"] == figures["flops"]


def test_a_peak_is_not_lowered_by_what_was_left_before_it(subject):
    before = memory.forget_memory_peak(subject.device)
    gc.disable()
    try:
        left = [torch.zeros(1 << 20, device=subject.device)]
        left.append(left)
        del left
        started = memory.forget_memory_peak(subject.device)
    finally:
        gc.enable()
    assert started == before


@pytest.mark.parametrize(("reserved", "share"), [(3 << 30, 0.5), (10**8, None)])
def test_fragmentation_is_that_of_a_large_model(subject, monkeypatch, reserved, share):
    """Of a small one it would be the rounding of the allocator, and take a part of a card for nothing."""
    before = 1 << 30
    peak = MemoryPeak(allocated_nbytes=reserved // 2 - before, reserved_nbytes=reserved)
    monkeypatch.setattr(speed, "forget_memory_peak", lambda _device: before)
    monkeypatch.setattr(speed, "memory_peak", lambda _device, _before: peak)
    speed.check_recipe("recipe fp32", subject, recipe="fp32")
    assert subject.calibration.fragmentation_share == share


@pytest.mark.parametrize("kernel", ["fused", "math"])
def test_attention_that_keeps_scores_is_a_warning(subject, kernel):
    with sdpa_kernel(SDPBackend.MATH) if kernel == "math" else nullcontext():
        finding, _ = speed.check_attention("attention kernel", subject)
    assert (finding.state, subject.calibration.attention) == ("warning" if kernel == "math" else "ok", kernel)
