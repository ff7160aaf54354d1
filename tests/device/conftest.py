"""Tests on the device `sim`.

The device is loaded when this folder is collected: the first backward pass of a process starts autograd's threads, one
for each device that is known by then. The device stays hidden from the tests of other folders, which choose theirs.
Without a C++ compiler every test that asks for the device fails, and says what to install.
"""

import pytest
import torch

from tests.device.build import BuildError
from tests.device.sim import load

_FAILURE = None
try:
    load().set_visible(False)
except BuildError as error:
    _FAILURE = error


@pytest.fixture(scope="session")
def sim_library():
    """`torch.sim`, built and loaded."""
    if _FAILURE is not None:
        raise _FAILURE
    return torch.sim


@pytest.fixture
def sim(sim_library):
    """`torch.sim`, visible, with counts at zero; a race that the test leaves behind fails the test."""
    sim_library.set_visible(True)
    sim_library.reset_counts()
    yield sim_library
    sim_library.set_float64(True)
    sim_library.set_seed(0)
    torch.accelerator.set_device_index(0)
    try:
        for index in range(sim_library.device_count()):
            torch.accelerator.synchronize(index)
    finally:
        sim_library.set_races(True)
        sim_library.set_visible(False)
