"""Every run that comes with thinpipe can be read, and its model can be built and placed."""

from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.own.runs import keel
from thinpipe.config.presets import preset_names, settings_file
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.models import build
from thinpipe.pipeline.placement import place


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_makes_sense(name: str) -> None:
    config = load_toml(settings_file(name), RunConfig)
    model = build(config.model.resolve(vocab_size=32_000))
    parallelism = config.parallelism
    place(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree, len(model.segments))
    assert config.training.seq_len <= model.config.max_seq_len


def test_the_papers_run_has_the_papers_size() -> None:
    config = load_toml(settings_file("preset:paper"), RunConfig)
    model = config.model.resolve(vocab_size=128_256)
    assert (model.dim, model.n_layers, model.subspace.width) == (4096, 8, 40)
    weights = sum(parameter.numel() for parameter in build(model).parameters())
    assert 1.5e9 < weights < 2.5e9


def test_the_default_run_is_the_one_that_the_study_measured() -> None:
    """But for its processes, which do not change a bit of it, for compiling, and for what is only kept or shown."""
    here = load_toml(settings_file("preset:default"), RunConfig)
    measured = keel(32).config(Path("tokens"), Path("runs/default"))
    changed = {
        section.name for section in fields(here) if getattr(here, section.name) != getattr(measured, section.name)
    }
    assert changed <= {"parallelism", "execution", "checkpoint", "validation", "metrics"}


def test_a_file_is_taken_as_it_is_and_an_unknown_name_refused() -> None:
    assert str(settings_file("runs/a.toml")) == "runs/a.toml"
    with pytest.raises(UserError, match="preset:paper"):
        settings_file("preset:papers")
