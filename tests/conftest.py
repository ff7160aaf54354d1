"""Every test starts from the same random state and one thread: CPU results are repeatable for a fixed thread count.

No test reads or writes what `thinpipe selftest` has measured on the machine. Tests of a module that imports a way to
start programs or servers, and those that use the fixture of that name, carry the mark `programs`.
"""

import os
import subprocess

import hypothesis
import pytest
import torch

from tests.programs import ENVIRONMENT
from tests.run_fixtures import gpt2_config, programs, run_config, tokens  # noqa: F401  fixtures for every folder
from thinpipe.core.state_folder import STATE_FOLDER_VARIABLE

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
"""No time limit for a single example: tests must pass on a busy machine."""

_STARTERS = {
    "tests.device.mutations",
    "tests.swarm.brokers",
    "tests.swarm.network_namespaces",
    "tests.swarm.hubs",
    "tests.programs",
    "tests.transport.processes",
    "tests.warm",
}


@pytest.fixture(autouse=True, scope="session")
def no_calibration(tmp_path_factory):
    os.environ[STATE_FOLDER_VARIABLE] = ENVIRONMENT[STATE_FOLDER_VARIABLE] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if _starts_programs(item.module) or "programs" in item.fixturenames:
            item.add_marker("programs")


def _starts_programs(module):
    names = vars(module).values()
    return subprocess in names or any(getattr(value, "__module__", None) in _STARTERS for value in names)
