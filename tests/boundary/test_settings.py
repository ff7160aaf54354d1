"""Settings of [boundary] that make no sense are refused with what to write instead; the others survive a file."""

import tomllib
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from thinpipe.config.boundary import PRESETS, BoundaryConfig, CompressionConfig, boundary_of_published_model
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, from_table
from thinpipe.core.errors import UserError

TOPK = {"kind": "topk", "keep": 0.1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"states": {"kind": "topk"}}, r'boundary.states.kind = "topk" needs boundary.states.keep'),
        ({"states": {"kind": "quantise"}}, r"needs boundary.states.bits"),
        ({"gradients": {"kind": "lowrank"}}, r"needs boundary.gradients.rank"),
        ({"states": {"keep": 0.1}}, r'boundary.states.keep is for kind = "topk", not "none": leave it out'),
        ({"states": {**TOPK, "bits": 4}}, r'bits is for kind = "quantise", not "topk"'),
        ({"states": {**TOPK, "per": "token", "rotate": True}}, r'rotate is for kind = "quantise"'),
        ({"states": {"kind": "lowrank", "rank": 4, "per": "token"}}, r'for kind = "topk" or "quantise"'),
        ({"states": {"kind": "topk", "keep": 1.5}}, r"between 0 and 1, not 1.5"),
        ({"states": {"kind": "quantise", "bits": 9}}, r"bits must be 2 to 8, not 9"),
        ({"states": {"kind": "quantise", "bits": 4, "tile": 1}}, r"tile must be at least 2"),
        ({"states": {"kind": "quantise", "bits": 4, "tile": 8, "per": "token"}}, r"leave one out"),
        ({"states": {"kind": "quantise", "bits": 4, "whole_tokens": 0}}, r"whole_tokens must be at least 1, not 0"),
        ({"states": {"kind": "quantise", "bits": 4, "whole_channels": -1}}, r"whole_channels must be at least 1"),
        ({"gradients": {**TOPK, "whole_channels": 4}}, r'whole_channels is for kind = "quantise", not "topk"'),
        ({"preset": "tuning", "states": TOPK, "gradients": TOPK}, r'preset = "tuning" has no effect'),
        ({"preset": "tuning", "forward": "bf16", "backward": "bf16"}, r'preset = "tuning" has no effect'),
        ({"preset": "tuning", "states": {"bits": 4}}, r'boundary.states.bits is for kind = "quantise", not "none"'),
        ({"preset": "turning"}, r"boundary.preset: invalid enum value .turning"),
        ({"states": {"kind": "lowrank", "rank": 0}}, r"rank must be at least 1"),
        ({"states": {"feedback": "ef21"}}, r"set boundary.states.kind, or leave it out"),
        ({"states": {**TOPK, "reuse_mask": True}}, r"set it in boundary.gradients|leave them out"),
        ({"states": {"kind": "topk", "reuse_mask": True}}, r"set it in boundary.gradients"),
        ({"gradients": {"kind": "topk", "reuse_mask": True}}, r'set boundary.states.kind = "topk"'),
        ({"states": TOPK, "gradients": {**TOPK, "reuse_mask": True}}, r"keep and per of the states: leave them out"),
        ({"gradients": {**TOPK, "feedback": "aqsgd"}}, r'for states: write "ef" or "ef21"'),
        ({"states": TOPK, "forward": "bf16"}, r"boundary.forward is for boundary.states.kind"),
        ({"gradients": TOPK, "backward": "int8"}, r"boundary.backward is for boundary.gradients.kind"),
        ({"states": TOPK, "store": "somewhere"}, r"boundary.store is for"),
        ({"at_inference": False}, r"no effect on uncompressed fp32 states"),
        ({"gradients": TOPK, "at_inference": False}, r"no effect on uncompressed fp32 states"),
        ({"states": {"knid": "topk"}}, r"did you mean boundary.states.kind"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(table, message):
    with pytest.raises(UserError, match=message):
        from_table({"boundary": table}, RunConfig, where="run.toml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"states": CompressionConfig(kind="top-k")},
            "boundary.states.kind is 'top-k': there are none, topk, quantise",
        ),
        ({"forward": "int5"}, "boundary.forward is 'int5': there are fp32, bf16, int8, int4"),
        (
            {"gradients": CompressionConfig(kind="topk", keep=0.1, feedback="EF")},
            "feedback is 'EF': there are none, ef,",
        ),
        ({"states": CompressionConfig(kind="topk", keep=0.1, format="fp16")}, "format is 'fp16': there are fp32, bf16"),
        ({"states": "int4"}, "boundary.states is 'int4': write a CompressionConfig"),
        ({"states": CompressionConfig(kind="quantise", bits="4")}, "boundary.states.bits is '4': write a whole number"),
        ({"states": CompressionConfig(kind="topk", keep="0.1")}, "keep is '0.1': write a number"),
        ({"states": CompressionConfig(kind="quantise", bits=4, rotate="yes")}, "rotate is 'yes': write True or False"),
        ({"method": "dense"}, "boundary.method is 'dense': there are none, subspace, None"),
    ],
)
def test_a_wrong_choice_in_python_is_refused_with_the_choices(settings, message):
    with pytest.raises(UserError) as refused:
        BoundaryConfig(**settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "table",
    [
        {"states": {**TOPK, "per": "token", "format": "int8"}, "gradients": {"kind": "topk", "reuse_mask": True}},
        {"states": {"kind": "quantise", "bits": 4, "tile": 64, "rotate": True}, "backward": "bf16"},
        {"states": {"kind": "quantise", "bits": 2, "feedback": "aqsgd"}, "store": "folder"},
        {"gradients": {"kind": "lowrank", "rank": 8, "feedback": "ef"}},
        {"forward": "int8", "at_inference": False},
        {"preset": "tuning"},
        {"preset": "tuning-thin", "states": {**TOPK, "feedback": "ef21"}, "at_inference": False},
        {"preset": "none", "backward": "bf16"},
    ],
)
def test_what_makes_sense_is_the_same_after_a_file(table):
    settings = from_table(table, BoundaryConfig, where="run.toml")
    assert from_table(tomllib.loads(dump_toml(settings)), BoundaryConfig, where="again") == settings


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_settings_say(preset):
    states, gradients = PRESETS[preset]
    config = BoundaryConfig(preset=preset)
    assert replace(config, preset=None) == BoundaryConfig(states=states, gradients=gradients)
    assert all(
        compression.rotate and compression.whole_tokens and compression.whole_channels
        for compression in PRESETS[preset]
    )


def test_every_preset_can_be_chosen():
    literals = get_args(get_args(get_type_hints(BoundaryConfig)["preset"])[0])
    assert {*literals} == {"none", *PRESETS}


def test_a_preset_leaves_a_direction_with_settings_alone_and_replaces_another_preset():
    states, gradients = PRESETS["tuning-thin"]
    mixed = BoundaryConfig(preset="tuning", gradients=gradients)
    assert (mixed.states, mixed.gradients) == (PRESETS["tuning"][0], gradients)
    assert BoundaryConfig(preset="tuning", backward="bf16").gradients == CompressionConfig()
    assert replace(BoundaryConfig(preset="tuning"), preset="tuning-thin").states == states  # as a flag beside a file


def test_a_published_model_has_the_preset_unless_something_is_set():
    assert boundary_of_published_model(BoundaryConfig()) == BoundaryConfig(preset="tuning")
    for chosen in (BoundaryConfig(preset="none"), BoundaryConfig(preset="tuning-thin"), BoundaryConfig(forward="bf16")):
        assert boundary_of_published_model(chosen) == chosen
