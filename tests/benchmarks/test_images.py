"""The image study: crossings that change nothing where they should not, and verdicts that follow from figures."""

from dataclasses import replace

import msgspec
import pytest
import torch
import torch.nn.functional as F

from benchmarks.digits import SHADES, digits, shifted
from benchmarks.images.claims import Results, Scores, claims, floor, hurts_badly, verdict, worse
from benchmarks.images.execute import read, results_path, tasks
from benchmarks.images.report import report
from benchmarks.images.settings import SETTINGS, UNCOMPRESSED, Setting
from benchmarks.images.training import Outcome, Recipe, Score, chain_of, make_methods, message_shapes, score, train
from benchmarks.vision import draw, resnet, walk
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
    chain = chain_of(model.train(), make_methods(setting, shapes, seed), seed)
    chain.begin(rows(), step=0, microbatch=0)
    return gradients(model, chain())


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
    chain = chain_of(model, make_methods(Setting(kind="topk", level=0.1), shapes, 0), 0)
    for boundary, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        crossing = chain.crossing(boundary, step=0, microbatch=0, training=True)
        arrived = chain.methods[boundary].decode_state(
            chain.methods[boundary].encode_state(state, rows(), crossing), rows(), crossing
        )
        kept = arrived != 0
        assert int(kept.flatten(1).sum(1).max()) <= round(0.1 * shape.tokens * shape.width)
        assert torch.equal(arrived[kept], state[kept])


def test_settings_are_whole_and_have_names_of_their_own():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) == 1 + 4 * 6 + 3 * 4 + 3 * 5
    for setting in SETTINGS:
        boundary = setting.boundary
        assert (boundary.states.kind != "none") is (setting.kind != "none" and setting.where != "gradients")
        assert (boundary.gradients.kind != "none") is (setting.kind != "none" and setting.where != "activations")
    assert len(tasks()) == 3 * len(SETTINGS)


def test_inference_without_compression_is_the_uncut_network():
    model = network().eval()
    test_NW = digits(96, 96).test_NW
    whole = chain_of(model, make_methods(UNCOMPRESSED, message_shapes(model, test_NW[:16]), 0), 0)
    with torch.no_grad():
        logits = torch.cat([model(rows_BW[:, :-1]) for rows_BW in test_NW.split(16)])
    right = (logits.argmax(1) == test_NW[:, -1]).float().mean().item()
    assert score(whole, test_NW, 16) == Score(F.cross_entropy(logits, test_NW[:, -1]).item(), right)


@pytest.mark.parametrize(
    "setting",
    [UNCOMPRESSED, *(Setting(kind="topk", level=0.1, memory=memory) for memory in ("ef", "ef21", "aqsgd"))],
    ids=lambda setting: setting.memory,
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


def scores(*pairs):
    return Scores(errors=tuple(error for error, _ in pairs), losses=tuple(loss for _, loss in pairs))


def test_only_what_lies_outside_the_spread_is_worse_and_errors_come_first():
    good, bad = scores((0.01, 0.2), (0.02, 0.3)), scores((0.03, 0.1), (0.04, 0.1))
    assert worse(bad, good) is True
    assert worse(good, bad) is False
    overlapping = scores((0.02, 0.4), (0.04, 0.5))
    assert worse(overlapping, good) is True  # by the loss
    assert worse(scores((0.02, 0.3), (0.04, 0.5)), good) is None
    assert hurts_badly(bad, good) is False  # by the loss: the errors overlap with twice those of the good one
    assert hurts_badly(scores((0.05, 0.1), (0.06, 0.1)), good) is True


def test_verdicts_need_half_of_the_levels_and_no_voice_against():
    assert verdict([True, True, None, None]) == "reproduced"
    assert verdict([False, False, None, None]) == "refuted"
    for votes in ([True, None, None, None], [True, True, True, False], [None] * 4):
        assert verdict(votes) == "not decided"


def test_a_floor_is_the_last_level_before_the_fall():
    none, fine, bad = scores((0.02, 0.1)), scores((0.025, 0.12)), scores((0.1, 0.4))
    rulings = {
        (False, True): "reproduced",
        (False, False): "refuted",
        (True, True): "refuted",
    }
    for (at, below), ruling in rulings.items():
        levels = {0.2: fine, 0.1: bad if at else fine, 0.05: bad if below else fine}
        assert floor("", levels, 0.1, none).verdict == ruling


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


@pytest.mark.parametrize(("fragile", "ruling"), [("gradients", "reproduced"), ("activations", "refuted")])
def test_verdicts_follow_from_the_figures(fragile, ruling):
    results = Results.of(outcome(setting, seed, fragile=fragile) for setting, seed in tasks())
    found = {claim.text: claim.verdict for claim in claims(results)}
    for kind in ("TopK", "quantisation"):
        assert found[f"Gradients need milder compression than activations: {kind}"] == ruling
    assert found["A model trained with TopK works well only if compression stays on at inference"] == "not decided"


def test_results_are_read_back_without_a_line_that_was_cut_short_and_reported(tmp_path):
    made = [outcome(setting, seed, fragile="both") for setting, seed in tasks()]
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in made)
    results_path(tmp_path).write_bytes(lines + lines[:100])
    assert read(tmp_path, TINY) == made
    assert read(tmp_path, replace(TINY, epochs=2)) == []
    report(read(tmp_path, TINY), TINY, tmp_path)
    page = (tmp_path / "images.md").read_text()
    assert page.count("\n| topk") == 4 * 6 + 3 * 5
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no seed has all settings"):
        report(made[:5], TINY, tmp_path)
