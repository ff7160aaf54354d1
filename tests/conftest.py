"""Every test starts from the same random state and one thread: CPU results are repeatable for a fixed thread count."""

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)
