"""Ranks of matrices whose ranks are known, and streams that nothing but writers can change."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.image_models import PATCHES, walk
from benchmarks.rank.families import FAMILIES, Options, Task, images
from benchmarks.rank.history import across_tokens, follow, learn, look, steps_to_look_at, writers
from benchmarks.rank.report import Group, conclusion, groups, write_report
from benchmarks.rank.spectrum import ranks

OPTIONS = Options(output=Path(), dim=32, depth=2, steps=4, moments=4, images=8, seq_len=16)


def task_of(name):
    if FAMILIES[name].task is images:
        return images(OPTIONS, Path())
    ids_BW = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(0))
    return Task(rows_at=lambda _step: ids_BW, unseen_BW=ids_BW, labels=slice(1, None), vocab_size=50)


def made(name):
    task = task_of(name)
    return FAMILIES[name].build(OPTIONS, task), task


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_ranks_of_known_matrices(scale):
    square = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q
    cases = [
        (square, 20, 20),
        (square[:7], 7, 7),
        (square[:, :7], 7, 7),
        (torch.outer(torch.randn(9), torch.randn(5)), 1, 1),
        (torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0])), 6 / 4, 2**1.5),
        (square[:, :3] @ torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)), 6 / 4, 2**1.5),
    ]
    for matrix, stable, effective in cases:
        found = ranks(scale * matrix)
        assert found.stable == pytest.approx(stable, rel=1e-5)
        assert found.effective == pytest.approx(effective, rel=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_but_writers_changes_the_stream(name):
    """Without them every block that keeps the width passes on what it was given; with any one, not."""
    model, task = made(name)
    model.eval()
    ids_BT = task.unseen_BW[:, :-1]
    found = [(key, module) for key, module in model.named_modules() if key in writers(model)]
    assert len(found) == len(model.segments) * OPTIONS.depth * (1 if name == "resnet" else 2)
    weights = {key: module.weight.detach().clone() for key, module in found}
    for _, module in found:
        nn.init.zeros_(module.weight)
    before, after = still(model, ids_BT)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    for key, module in found:
        if name == "resnet" and ".blocks.0." in key and "segments.0" not in key:
            continue  # changes the width, so there is nothing to compare with
        module.weight.data.copy_(weights[key])
        before, after = still(model, ids_BT)
        assert not all(torch.equal(one, two) for one, two in zip(before, after, strict=True)), key
        nn.init.zeros_(module.weight)


def still(model, ids_BT):
    """What enters and what leaves each block that keeps the width."""
    entered, left = [], []

    def note(_module, inputs, output):
        one, two = (getattr(each, "state", each) for each in (inputs[0], output))
        if one.shape == two.shape:
            entered.append(one)
            left.append(two)

    blocks = [block for segment in model.segments for block in segment.blocks.children()]
    hooks = [block.register_forward_hook(note) for block in blocks]
    with torch.no_grad():
        walk(model.segments, ids_BT)
    for hook in hooks:
        hook.remove()
    assert len(entered) >= len(blocks) / 2
    return entered, left


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_carries_all_that_the_rest_needs(name):
    """Another sample's state, given to the segments behind a cut, gives that sample's answer."""
    model, task = made(name)
    model.eval()
    rows_BW = task.unseen_BW[:4]
    one, other = rows_BW[:2, :-1], rows_BW[2:, :-1]
    with torch.no_grad():
        *states, logits = walk(model.segments, other)
        for cut, state in enumerate(states):
            for segment in list(model.segments)[cut + 1 :]:
                state = segment(one, state)
            assert torch.equal(state, logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_histories_begin_with_noise_and_see_training(name):
    model, task = made(name)
    seen_BW, options = task.unseen_BW[:8], replace(OPTIONS, steps=20)
    task = replace(task, rows_at=lambda _step: seen_BW, unseen_BW=seen_BW)
    first, *_, last = learn(model, task, options)
    assert (first.step, last.step) == (0, options.steps)
    assert last.loss < first.loss
    assert len(first.cuts) == 3
    for key, weight in writers(model).items():
        full = min(weight.shape)
        assert 0.2 < first.writers[key].stable / full < 0.8
        assert first.writers[key] != last.writers[key]
    assert look(model, task, options.steps) == last, "the last look is at the trained network"


def test_only_a_mixer_writes_along_its_tokens():
    for name in FAMILIES:
        model, _ = made(name)
        full = {key: min(weight.shape) for key, weight in writers(model).items()}
        found = across_tokens(model)
        assert len(found) == (len(full) // 2 if name == "mixer" else 0)
        assert {full[key] for key in found} <= {PATCHES}


def test_looks_are_dense_at_first_and_end_with_the_last_step():
    options = Options(output=Path(), steps=300, moments=16)
    steps = sorted(steps_to_look_at(options))
    assert steps[:4] == [0, 1, 2, 3]
    assert steps[-1] == 300
    assert len(steps) <= 18


def with_ranks(history, at, kept):
    """Stable ranks of the names at a moment set to this part of their start."""
    moment, first = history.moments[at], history.moments[0].writers
    changed = {name: replace(first[name], stable=part * first[name].stable) for name, part in kept.items()}
    history.moments[at] = replace(moment, writers={**moment.writers, **changed})


def test_the_report_names_those_that_collapsed_and_those_that_came_back(tmp_path):
    history = follow("mixer", OPTIONS, tmp_path, lambda _moment: None)
    width, tokens = groups([history])
    assert "MLP-Mixer" in conclusion([history]).split("It does not in:")[1]
    with_ranks(history, -1, dict.fromkeys(tokens.names, 0.01))
    assert "MLP-Mixer" in conclusion([history]).split("It does not in:")[1], "writers along tokens are not averaged in"
    with_ranks(history, 2, dict.fromkeys(width.names, 0.2))
    with_ranks(history, -1, dict.fromkeys(width.names, 0.9))
    page, found = write_report([history], tmp_path / "rank"), conclusion([history])
    assert found in page
    assert f"It does in: MLP-Mixer (0.20 at step {history.moments[2].step}, 0.90 at the end)" in found
    assert "Still collapsed at the end: none" in found
    assert page.count("\n| MLP-Mixer (no attention") == 2
    assert Group(history).lowest[0] == pytest.approx(0.2)
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")
