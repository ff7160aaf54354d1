"""Merges from files to files: the bits of a merge in memory, and memory that does not grow with the layer."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from thinpipe.rounds import layer_files
from thinpipe.rounds.formats import FormatError, decode, encode
from thinpipe.rounds.layer_files import MOMENTUM, check_file, merge_layer
from thinpipe.rounds.merge import OuterSettings, outer_step, weighted_sum

SHAPES = {"matrix": torch.Size((33, 100)), "norm": torch.Size((300,)), "scalar": torch.Size(())}


def some(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def saved(path, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("piece", [256, 1024, 1 << 22])
@pytest.mark.parametrize(("form", "update_form"), [("int4", "int8"), ("int8", "fp32"), ("fp32", "int4")])
def test_the_bits_are_those_of_a_merge_in_memory(form, update_form, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_files, "PIECE", piece)
    outer = OuterSettings(lr=0.9, momentum=0.8, warmup_rounds=4)
    weights, momenta, kept = some(0), {}, saved(tmp_path / "round0.safetensors", some(0))
    for number in range(1, 4):
        samples = [16, 4, 12]
        contributions = [encode(some(10 * number + replica, 1e-2), form) for replica in range(3)]
        update = weighted_sum(
            (count, decode(each, SHAPES, form)) for count, each in zip(samples, contributions, strict=True)
        )
        encoded = encode(update, update_form)
        outer_step(weights, momenta, decode(encoded, SHAPES, update_form), outer, number)

        paths = [saved(tmp_path / f"{number}.{index}", each) for index, each in enumerate(contributions)]
        for path in paths:
            check_file(path, SHAPES, form)
        to_update, to_weights = tmp_path / f"update{number}", tmp_path / f"round{number}.safetensors"
        merge_layer(
            [*zip(samples, paths, strict=True)],
            kept,
            SHAPES,
            form=form,
            update_form=update_form,
            outer=outer,
            round_number=number,
            to_update=to_update,
            to_weights=to_weights,
        )
        kept, found = to_weights, load_file(to_weights)
        assert found.keys() == {*SHAPES, *(f"{name}:{MOMENTUM}" for name in SHAPES)}
        for name in SHAPES:
            assert torch.equal(found[name], weights[name])
            assert torch.equal(found[f"{name}:{MOMENTUM}"], momenta[name])
        again = load_file(to_update)
        assert again.keys() == encoded.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in encoded.items())


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("int4", lambda tensors: tensors.pop("norm")),
        ("int4", lambda tensors: tensors.update(other=torch.zeros(3))),
        ("int4", lambda tensors: tensors.update({"norm:scale": torch.full((2,), torch.nan)})),
        ("int8", lambda tensors: tensors.update({"matrix:scale": tensors["matrix:scale"][:-1]})),
        ("fp32", lambda tensors: tensors.update(norm=torch.full((300,), torch.inf))),
        ("fp32", lambda tensors: tensors.update(norm=torch.zeros(300, dtype=torch.float64))),
    ],
)
def test_what_no_replica_sends_is_refused(form, change, tmp_path):
    tensors = encode(some(1), form)
    check_file(saved(tmp_path / "good", tensors), SHAPES, form)
    change(tensors)
    with pytest.raises(FormatError):
        check_file(saved(tmp_path / "bad", tensors), SHAPES, form)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, (10).to_bytes(8, "little") + b"[1, 2, 3] "])
def test_noise_is_refused(data, tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        check_file(path, SHAPES, "int4")


LARGE = """
import resource, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from thinpipe.rounds.formats import encode
from thinpipe.rounds.layer_files import check_file, merge_layer
from thinpipe.rounds.merge import OuterSettings

folder, numel = Path(sys.argv[1]), int(sys.argv[2])
shapes = {"table": torch.Size((numel,))}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
paths = [folder / f"contribution{replica}" for replica in range(2)]
for path in paths:
    check_file(path, shapes, "int4")
merge_layer([(4, path) for path in paths], folder / "weights", shapes, form="int4", update_form="int8",
    outer=OuterSettings(), round_number=1, to_update=folder / "update", to_weights=folder / "moved")
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def grown(folder, numel):
    """Bytes by which a process grows that merges a layer of so many weights."""
    folder.mkdir()
    weights = {"table": torch.ones(numel)}
    save_file(weights, folder / "weights")
    for replica in range(2):
        save_file(encode(weights, "int4"), folder / f"contribution{replica}")
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(folder), str(numel)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_memory_does_not_grow_with_the_layer(tmp_path):
    small, large = (grown(tmp_path / f"{numel}", numel) for numel in (1 << 23, 1 << 26))
    assert 2 * large < 4 << 26, "the weights alone would take more"
    assert large < small + (32 << 20)
