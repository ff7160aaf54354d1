"""The pipeline relies on undocumented names of torch: each is checked, by what torch's code uses and not by version."""

import ast
import logging
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from thinpipe import CompressedStage
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import TESTED_TORCH
from thinpipe.pipeline import stage, torch_names

ROOT = Path(__file__).parents[2]


def test_the_installed_torch_has_every_name_and_was_tested(caplog):
    assert torch_names.missing_names() == []
    torch_names.check_torch()
    assert caplog.records == []


def test_a_name_that_torch_no_longer_uses_stops_the_pipeline_and_is_named(monkeypatch):
    monkeypatch.setattr(torch_names, "NAMES", torch_names.NAMES | {"forward_cache"})
    with pytest.raises(UserError, match=r"does not use forward_cache .*pip install \"torch=="):
        torch_names.check_torch()


def test_another_way_to_agree_on_shapes_stops_the_pipeline(monkeypatch):
    """Half of one known way and nothing of the other."""
    monkeypatch.setattr(torch_names, "_AGREEMENTS", ({"_prepare_forward_infra", "_vote"}, {"_agree"}))
    assert torch_names.missing_names() == ["_agree"]


def test_an_untested_minor_warns_and_names_the_tested_ones(monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    with caplog.at_level(logging.WARNING):
        torch_names.check_torch()
    (record,) = caplog.records
    assert "torch 2.99.1+cu140 has not been tested" in record.getMessage()
    assert "2.13, 2.14, 2.15" in record.getMessage()
    assert "thinpipe doctor" in record.getMessage()


def test_every_name_of_torchs_stage_that_our_stages_use_is_checked():
    """What our stages read from `self` or `super()` or override, of what torch's stage has."""
    bases = [base for base in PipelineStage.__mro__ if base.__module__.startswith("torch.")]
    theirs = {name for base in bases for name in (*vars(base), *base.__init__.__code__.co_names)}
    ours = set()
    for node in ast.walk(ast.parse(Path(stage.__file__).read_text())):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            inherited = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            ours |= {node.attr} if own or inherited else set()
        elif isinstance(node, ast.FunctionDef):
            ours.add(node.name)
    known = torch_names.NAMES.union(*torch_names._AGREEMENTS, {"__init__"})
    assert (ours & theirs) - known == set()
    assert len(ours & theirs) > 15


def test_the_range_of_the_package_is_what_was_tested():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torchs,) = (text.removeprefix("torch") for text in dependencies if text.startswith("torch"))
    allowed = SpecifierSet(torchs)
    assert [minor for minor in range(30) if f"2.{minor}.1" in allowed] == [
        int(minor.removeprefix("2.")) for minor in TESTED_TORCH
    ]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Breaks(nn.Linear):
    """Raises in its second forward pass."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise ValueError("broken")
        return super().forward(x)


@pytest.mark.usefixtures("group")
def test_after_a_step_that_raised_no_received_tensor_is_held():
    """torch 2.15 refuses to validate after a training step whose receive slots are still filled."""
    shape = (1, 3, 8)
    modules = Breaks(8, 8), nn.Linear(8, 8)
    stages = [CompressedStage(module, index, 2, "cpu", shape=shape) for index, module in enumerate(modules)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=lambda output, _target: output.square().mean())
    batch = torch.ones(2, 3, 8)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        schedule.step(batch, target=batch)
    assert schedule.eval(batch, target=batch).shape == batch.shape
    slots = [slot for stage in stages for slots in stage.grad_recv_info.values() for slot in slots]
    assert slots
    assert [slot.buffer for slot in slots] == [None] * len(slots)
