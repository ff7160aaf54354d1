"""`thinpipe.device` is the one package that knows types of devices, and its choice of a device."""

import ast
from pathlib import Path

import pytest
import torch

import thinpipe
from thinpipe.core.errors import UserError
from thinpipe.device.choice import choose_device

SOURCE = Path(thinpipe.__file__).parent
TYPES = {"cuda", "mps", "xpu", "hip", "is_cuda", "is_mps"}


def device_types_in(text):
    """Attributes such as torch.cuda, and strings that are a type of device."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in TYPES:
            yield node.attr
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in TYPES:
            yield node.value


def test_no_other_package_names_a_type_of_device():
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name != "device"]
    assert len(files) > 200
    assert {str(path): found for path in files if (found := [*device_types_in(path.read_text())])} == {}


LINES = ("torch.cuda.synchronize()", 'x.device.type == "mps"', 'torch.device("cuda:1")', "x.is_cuda")


@pytest.mark.parametrize("line", LINES)
def test_a_named_type_would_be_found(line):
    assert [*device_types_in(line)]


def test_the_accelerator_is_chosen_by_the_number_of_the_process(sim, monkeypatch):  # noqa: ARG001
    assert choose_device("auto") == choose_device("sim") == torch.device("sim:0")
    for rank, index in (("1", 1), ("2", 0), ("3", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert choose_device("auto") == torch.device("sim", index)
    assert choose_device("sim:0") == torch.device("sim:0")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["sim:2", "cuda", "mps", "gpu"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(sim, name):  # noqa: ARG001
    with pytest.raises(UserError, match=f"there is no device '{name}' here: write auto, cpu, sim:0, sim:1"):
        choose_device(name)
