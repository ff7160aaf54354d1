"""The command that compares precision recipes: it goes on where it stopped, and its page has what was computed."""

import json

import pytest

import thinpipe
from benchmarks import recipes


def test_runs_are_kept_and_compared_with_fp32(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "SEEDS", (0,))
    monkeypatch.setattr(recipes, "TIMED_STEPS", 1)
    settings = recipes.Settings(data=tokens, work=tmp_path / "work", output=tmp_path / "out", steps=2, dim=32)
    recipes.run(settings)
    pages = (tmp_path / "out.md").read_text()
    monkeypatch.setattr(thinpipe, "train", None)  # nothing is left to train
    recipes.run(settings)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["losses"].keys() == recipes.MODELS.keys()
    for model, losses in record["losses"].items():
        assert losses.keys() == set(recipes.RECIPES)
        exact, narrow = losses["fp32"]["0"], losses["bf16"]["0"]
        assert narrow != exact
        assert narrow == pytest.approx(exact, rel=0.01)
        assert f"| {model} | fp32 | 16.00 | {exact:.4f} |" in pages
        assert f"{narrow:.4f} ({narrow / exact - 1:+.2%}) | {narrow / exact - 1:+.2%} |" in pages
