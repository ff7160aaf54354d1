"""Layers that a peer does not train are found by sketches of their weights."""

import math

import pytest
import torch

from thinpipe.core.event_text import format_event_line
from thinpipe.swarm.hub.layer_changes import LayerChanges
from thinpipe.training.weight_sketch import root_mean_square_change, sketch_layers

RATE = 1e-3
HOLDERS = {"first": "anna", "blocks.0": "anna", "blocks.1": "bert", "last": "bert"}


def weights(seed=1):
    torch.manual_seed(seed)
    shapes = {"first.embed.weight": (512, 16), "last.head.weight": (100, 16)}
    shapes |= {f"blocks.{n}.{name}.weight": (33, 16) for n in (0, 1) for name in ("up", "down")}
    named = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    return named | {"blocks.0.norm.weight": torch.ones(16).requires_grad_(), "last.fixed.weight": torch.zeros(9, 9)}


def moved(parameters, *, by=RATE, only=lambda _name: True):
    return {
        name: (tensor.detach() + by * torch.randn_like(tensor) * only(name)).requires_grad_(tensor.requires_grad)
        for name, tensor in parameters.items()
    }


def found(before, after, holders=HOLDERS):
    changes = LayerChanges()
    changes.on_generation(holders)
    assert changes.on_commit(10, sketch_layers(before, seed=5)) is None, "nothing to compare with"
    return changes.on_commit(20, sketch_layers(after, seed=5))


def test_a_sketch_tells_how_much_a_layer_has_changed():
    """Over many seeds: the mean square is that of the change itself."""
    before = weights()
    after = moved(before, by=0.1)
    squares = [
        root_mean_square_change(sketch_layers(before, seed=n)["first"], sketch_layers(after, seed=n)["first"]) ** 2
        for n in range(30)
    ]
    true = (after["first.embed.weight"] - before["first.embed.weight"]).square().mean().item()
    assert sum(squares) / len(squares) == pytest.approx(true, rel=4 * math.sqrt(2 / 64 / 30))


def test_equal_weights_have_equal_sketches_and_other_seeds_have_others():
    assert sketch_layers(weights(), seed=1) == sketch_layers(weights(), seed=1)
    assert sketch_layers(weights(), seed=1)["first"] != sketch_layers(weights(), seed=2)["first"]
    assert set(sketch_layers(weights(), seed=1)) == set(HOLDERS)


def test_a_large_matrix_is_sketched_in_parts(monkeypatch):
    monkeypatch.setattr("thinpipe.training.weight_sketch._CHUNK", 640)
    before = weights()
    rows = {"first.embed.weight": before["first.embed.weight"].detach().clone().requires_grad_()}
    with torch.no_grad():
        rows["first.embed.weight"][-1, -1] += 1.0
    change = root_mean_square_change(sketch_layers(before, seed=1)["first"], sketch_layers(rows, seed=1)["first"])
    assert change == pytest.approx(1 / math.sqrt(512 * 16))


def test_layers_that_do_not_change_are_named_with_their_holder():
    before = weights()
    event = found(before, moved(before, only=lambda name: not name.startswith(("blocks.1", "last"))))
    assert (event.step, event.since, {*event.layers}, event.peers) == (20, 10, {"blocks.1", "last"}, ["bert"])
    assert f"{', '.join(event.layers)} hardly changed" in format_event_line(event)
    assert "bert did not train" in format_event_line(event)


def test_a_change_too_small_for_training_does_not_hide_a_layer():
    before = weights()
    after = moved(moved(before, only=lambda name: "blocks.1" not in name), by=1e-4 * RATE)
    assert found(before, after).layers == ["blocks.1"]


def test_a_table_of_which_few_rows_are_trained_is_not_named():
    before = weights()
    after = moved(before, only=lambda name: "first" not in name)
    with torch.no_grad():
        after["first.embed.weight"][:2] += RATE * torch.randn(2, 16)
    assert found(before, after) is None


def test_honest_layers_and_a_run_that_stands_still_are_not_named():
    before = weights()
    assert found(before, moved(before)) is None
    assert found(before, before) is None


def test_a_commit_is_not_compared_with_one_of_earlier_holders():
    before, changes = weights(), LayerChanges()
    after = moved(before, only=lambda name: not name.startswith("last"))
    changes.on_generation(HOLDERS)
    changes.on_commit(10, sketch_layers(before, seed=5))
    changes.on_generation(HOLDERS | {"last": "carla"})
    assert changes.on_commit(20, sketch_layers(after, seed=5)) is None
