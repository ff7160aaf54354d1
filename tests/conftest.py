"""Every test starts from the same random state and one thread: CPU results are repeatable for a fixed thread count.

Tests of a module that imports a way to start programs or servers carry the mark `programs`.
"""

import subprocess

import pytest
import torch

_STARTERS = {
    "tests.swarm.brokers",
    "tests.swarm.homes",
    "tests.train.hubs",
    "tests.train.programs",
    "tests.transport.processes",
    "tests.warm",
}


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if _starts_programs(item.module):
            item.add_marker("programs")


def _starts_programs(module):
    names = vars(module).values()
    return subprocess in names or any(getattr(value, "__module__", None) in _STARTERS for value in names)
