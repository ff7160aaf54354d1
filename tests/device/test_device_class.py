"""What devices say must be alike for equal bits."""

import os
import subprocess
import sys

import pytest
import torch

from thinpipe.device.device_class import deterministic_algorithms, device_class

CPU = torch.device("cpu")
PROGRAM = "from thinpipe.device.device_class import CPU, device_class; print(device_class(CPU))"


def test_an_accelerator_has_a_class_only_if_it_repeats_its_bits(sim):  # noqa: ARG001
    cards = [torch.device("sim", index) for index in range(2)]
    assert [device_class(card) for card in cards] == ["", ""]
    with deterministic_algorithms(True):
        found = [device_class(card) for card in cards]
    assert found[0] == found[1], "of one kind"
    assert found[0].startswith("sim: ")
    assert found[0] != device_class(CPU)


def test_cublas_gets_its_variable(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_digest_is_that_of_the_numbers(monkeypatch):
    before = device_class(CPU)
    assert device_class(CPU) == before
    product = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight: product(x.double(), weight.double()).float())
    after = device_class(CPU)
    assert after != before
    assert after.rpartition(", ")[0] == before.rpartition(", ")[0], "by name they are alike"


@pytest.mark.parametrize("kernels", [None, "default"], ids=["the same kernels", "without vector instructions"])
def test_programs_on_one_machine_are_alike_if_they_choose_the_same_kernels(kernels):
    threads = torch.get_num_threads()
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)} | ({"ATEN_CPU_CAPABILITY": kernels} if kernels else {})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    assert (done.stdout.strip() == device_class(CPU)) == (kernels is None)
    digest = done.stdout.split()[-1]
    assert (digest == device_class(CPU).split()[-1]) == (kernels is None), "seen in the numbers, not in the name alone"


def test_threads_are_part_of_the_class():
    threads, before = torch.get_num_threads(), device_class(CPU)
    torch.set_num_threads(threads + 1)
    try:
        assert device_class(CPU) != before
    finally:
        torch.set_num_threads(threads)
