"""The image study: boundaries that change nothing where they should not, and verdicts that follow from figures."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.nn.functional as F

from benchmarks.digits import SHADES, digits, shifted
from benchmarks.image_models import draw, resnet, walk
from benchmarks.images.claims import Results
from benchmarks.images.execute import describe, read, results_path, tasks
from benchmarks.images.report import report
from benchmarks.images.settings import SETTINGS, UNCOMPRESSED, Setting
from benchmarks.images.training import (
    Outcome,
    Recipe,
    Score,
    make_methods,
    message_shapes,
    score,
    stage_module_of,
    train,
)
from benchmarks.lossy_claims import decide
from thinpipe.core.errors import UserError

TINY = Recipe(widths=(4, 8, 8, 8), images=96, copies=1, epochs=1, batch=16)


def network(seed=0):
    model = resnet(TINY.widths, TINY.strides)
    draw(model, seed)
    return model


def rows(count=16):
    return digits(96, 96).train_NW[:count]


def gradients(model, logits):
    F.cross_entropy(logits, rows()[:, -1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def crossed(setting, seed=0):
    """The gradients of a network whose boundaries are crossed with this setting."""
    model = network(seed)
    shapes = message_shapes(model, rows())
    stage_module = stage_module_of(model.train(), make_methods(setting, shapes, seed), seed)
    stage_module.begin(rows(), step=0, microbatch=0)
    return gradients(model, stage_module())


def test_boundaries_without_compression_leave_every_gradient_as_it_is():
    model = network().train()
    uncut = gradients(model, model(rows()[:, :-1]))
    through = crossed(UNCOMPRESSED)
    assert all(torch.equal(uncut[name], through[name]) for name in uncut)
    assert any(gradient.count_nonzero() for gradient in uncut.values())


@pytest.mark.parametrize("where", ["activations", "gradients", "both", "both, one mask"])
def test_a_setting_compresses_what_it_says(where):
    setting = Setting(kind="topk", where=where, level=0.25)
    plain, compressed = crossed(UNCOMPRESSED), crossed(setting)
    head, first = "segments.3.head.linear.bias", "segments.0.first.conv.weight"
    assert torch.equal(plain[head], compressed[head]) is (where == "gradients")  # the head sees states only
    assert not torch.equal(plain[first], compressed[first])


def test_what_crosses_is_the_stream_and_a_tenth_of_it_with_topk_of_a_tenth():
    model = network().eval()
    states = walk(model.segments, rows()[:, :-1])[:-1]
    shapes = message_shapes(model, rows())
    assert [(shape.tokens, shape.width) for shape in shapes] == [(64, 4), (16, 8), (16, 8)]
    stage_module = stage_module_of(model, make_methods(Setting(kind="topk", level=0.1), shapes, 0), 0)
    for boundary, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        message_id = stage_module.message_id(boundary, step=0, microbatch=0, training=True)
        arrived = stage_module.methods[boundary].decode_state(
            stage_module.methods[boundary].encode_state(state, rows(), message_id), rows(), message_id
        )
        kept = arrived != 0
        assert int(kept.flatten(1).sum(1).max()) <= round(0.1 * shape.tokens * shape.width)
        assert torch.equal(arrived[kept], state[kept])


def test_settings_are_whole_and_have_names_of_their_own():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) == 1 + 4 * 6 + 3 * 4 + 3 * 5 + 4
    for setting in SETTINGS:
        boundary = setting.boundary
        assert (boundary.states.kind != "none") is (setting.kind != "none" and setting.where != "gradients")
        assert (boundary.gradients.kind != "none") is (setting.kind != "none" and setting.where != "activations")
    assert len(tasks()) == 3 * len(SETTINGS)


def test_inference_without_compression_is_the_uncut_network():
    model = network().eval()
    test_NW = digits(96, 96).test_NW
    whole = stage_module_of(model, make_methods(UNCOMPRESSED, message_shapes(model, test_NW[:16]), 0), 0)
    with torch.no_grad():
        logits = torch.cat([model(rows_BW[:, :-1]) for rows_BW in test_NW.split(16)])
    right = (logits.argmax(1) == test_NW[:, -1]).float().mean().item()
    assert score(whole, test_NW, 16) == Score(F.cross_entropy(logits, test_NW[:, -1]).item(), right)


@pytest.mark.parametrize(
    "setting",
    [UNCOMPRESSED, *(Setting(kind="topk", level=0.1, feedback=feedback) for feedback in ("ef", "ef21", "aqsgd"))],
    ids=lambda setting: setting.feedback,
)
def test_a_training_is_the_same_twice_and_compression_shows_at_inference(setting):
    first, second = (train(setting, 1, TINY) for _ in range(2))
    assert (first.on, first.off, first.training_loss) == (second.on, second.off, second.training_loss)
    assert (first.on == first.off) is (setting == UNCOMPRESSED)
    assert first.training_loss < 2.4


def test_images_are_ids_in_equal_classes_and_in_one_part_only():
    train_NW, test_NW = digits(896, 896)
    assert train_NW.shape == test_NW.shape == (896, 65)
    assert 0 == int(train_NW.min()) < int(train_NW.max()) == SHADES - 1
    for part in (train_NW, test_NW):
        assert min(part[:, -1].bincount()) >= 85
    assert not {tuple(row) for row in train_NW.tolist()} & {tuple(row) for row in test_NW.tolist()}


def test_shifts_move_pixels_and_keep_labels():
    image = torch.zeros(1, 65, dtype=torch.int64)
    image[0, 8 * 3 + 4], image[0, -1] = 16, 7
    places = set()
    for seed in range(60):
        moved = shifted(image, seed)
        assert torch.equal(moved, shifted(image, seed))
        assert moved[0, -1] == 7
        places |= {int(moved[0, :-1].argmax())}
    assert places == {8 * (3 + down) + 4 + right for down in (-1, 0, 1) for right in (-1, 0, 1)}


def test_an_answer_that_is_not_finite_is_wrong_and_its_loss_is_none():
    model = network().eval()
    test_NW = digits(96, 96).test_NW
    shapes = message_shapes(model, test_NW[:16])
    torch.nn.init.constant_(model.segments[3].head.linear.weight, float("nan"))
    assert score(stage_module_of(model, make_methods(UNCOMPRESSED, shapes, 0), 0), test_NW, 16) == Score(None, 0.0)
    lost = replace(outcome(UNCOMPRESSED, 0, fragile="both"), on=Score(None, 0.0))
    assert msgspec.json.decode(msgspec.json.encode(lost), type=Outcome) == lost
    assert Results.of([lost]).on[UNCOMPRESSED].losses == (math.inf,)
    assert "not finite" in describe(lost)


def outcome(setting, seed, *, fragile):
    """Made up: compression of `fragile` costs more the stronger it is, all other compression nothing."""
    strength = (1 - setting.level) if setting.kind == "topk" else (8 - setting.level) / 8
    error = 0.02 + 0.001 * seed + (0.1 * strength if setting.where == fragile else 0.0)
    made = Score(error * 3, 1 - error)
    return Outcome(
        setting=setting,
        seed=seed,
        recipe=TINY,
        on=made,
        off=made,
        training_loss=None,
        nbytes_per_image=1,
        seconds=1,
        versions={},
    )


GRADIENTS = "Gradients need milder compression than activations"
IN_ITS_WAY = "A model trained with TopK works well only if compression stays on at inference"


@pytest.mark.parametrize(("fragile", "ruling"), [("gradients", "reproduced"), ("activations", "refuted")])
def test_verdicts_follow_from_the_figures(fragile, ruling):
    results = Results.of(outcome(setting, seed, fragile=fragile) for setting, seed in tasks())
    found = {claim.text: str(claim.verdict) for claim in decide(results.evidence, results.judge)}
    assert found[GRADIENTS] == ruling
    assert found[IN_ITS_WAY] == "not decided: no difference"


def test_every_claim_has_its_settings_and_one_seed_decides_none():
    few = Results.of(outcome(setting, seed, fragile="gradients") for setting, seed in tasks(seeds=(0,)))
    assert {str(claim.verdict) for claim in decide(few.evidence, few.judge)} == {"not decided: 1 of 3 seeds"}


def test_results_are_read_back_without_a_line_that_was_cut_short_and_reported(tmp_path):
    made = [outcome(setting, seed, fragile="both") for setting, seed in tasks()]
    lost = Setting(kind="topk", level=0.02)
    made = [replace(each, on=Score(None, 0.1)) if each.setting == lost else each for each in made]
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in made)
    results_path(tmp_path).write_bytes(lines + lines[:100])
    assert read(tmp_path, TINY) == made
    assert read(tmp_path, replace(TINY, epochs=2)) == []
    report(read(tmp_path, TINY), TINY, tmp_path)
    page = (tmp_path / "images.md").read_text()
    assert page.count("\n| topk") == 4 * 6 + 3 * 5 + 4
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no seed has all settings"):
        report(made[:5], TINY, tmp_path)
