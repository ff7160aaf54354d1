"""A parameter that is renamed is drawn from the text that it was drawn from before."""

from dataclasses import replace

import pytest

from thinpipe.config.families import PRESETS
from thinpipe.config.model import ProjectionConfig
from thinpipe.models import build, materialise
from thinpipe.models.seed_names import SEED_NAMES, seed_name


@pytest.mark.parametrize(
    ("name", "table", "text"),
    [
        ("necks.1.anchors.tokens.weight", {}, "necks.1.anchors.tokens.weight"),
        ("necks.1.tables.weight", {"tables": "anchors"}, "necks.1.anchors.weight"),
        ("necks.1.tables_before.weight", {"tables": "anchors"}, "necks.1.tables_before.weight"),
        ("keels.1.tables.weight", {"keels": "necks", "tables": "anchors.tokens"}, "necks.1.anchors.tokens.weight"),
        ("head.norm.scale", {"head": "last", "head.norm.scale": "last.norm.weight"}, "last.norm.weight"),
        ("a.b", {"a": "b", "b": "a"}, "b.a"),
    ],
)
def test_whole_components_and_the_longest_line(name, table, text):
    assert seed_name(name, table) == text


def test_a_renamed_layer_begins_with_the_weights_it_had(monkeypatch):
    config = replace(
        PRESETS["llama-tiny"], dim=32, boundaries=(2,), projection=ProjectionConfig(width=4, token_prior_rank=4)
    )
    before = {name: p.clone() for name, p in materialise(build(config), seed=0).named_parameters()}
    monkeypatch.setitem(SEED_NAMES, "q_proj", "k_proj")
    after = dict(materialise(build(config), seed=0).named_parameters())
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith("q_proj.weight")}
    assert seed_name("blocks.0.self_attn.q_proj.weight") == "blocks.0.self_attn.k_proj.weight"
