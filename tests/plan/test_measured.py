"""The losses that a plan tells are those of the studies, and it tells none that was not measured."""

from pathlib import Path

import pytest

from thinpipe.boundary.settings import BoundarySection, Compression
from thinpipe.models.config import NeckConfig, SubspaceConfig
from thinpipe.plan.measured import MEASURED, nearest_gap, say_gap
from thinpipe.train.config import ModelSection

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows_of(folder: str) -> list[list[str]]:
    text = (RESULTS / folder / f"{folder}.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("gap", MEASURED, ids=lambda gap: gap.record)
def test_each_figure_stands_in_the_results(gap):
    folder, _, name = gap.record.partition(": ")
    figure = f"{gap.percent:+.2f}"
    rows = [row for row in rows_of(folder) if row[0] == name and f"{gap.million_tokens:.2f}" in row]
    rows = [row for row in rows if f"{gap.times_fewer:.1f}x" in row]
    assert any(cell.split(" ")[0] == figure for row in rows for cell in row), rows
    if gap.seeds > 1:
        assert any(str(gap.seeds) in row for row in rows)


def model(**changes):
    return ModelSection(preset="llama-10m", boundaries=(2, 4, 6), **changes).resolve(4096)


def test_a_keel_is_told_its_own_figure_and_a_distant_ratio_none():
    keel = model(neck=NeckConfig(width=26))
    assert nearest_gap(keel, BoundarySection(), 32.0).percent == 0.58
    assert nearest_gap(keel, BoundarySection(), 17.0).percent == -0.19
    assert nearest_gap(keel, BoundarySection(), 128.0) is None
    assert say_gap(keel, BoundarySection(), 128.0) == "not measured for keel at 128.0 times fewer bytes"
    assert "3 seeds" in say_gap(keel, BoundarySection(), 32.0)


def test_dense_in_bf16_loses_nothing_and_in_int8_is_not_measured():
    assert say_gap(model(), BoundarySection(forward="bf16", backward="bf16"), 1.0).startswith("none")
    assert say_gap(model(), BoundarySection(forward="int8", backward="int8"), 1.9).startswith("not measured for dense")


def test_kinds_are_not_mixed_up():
    sparse = BoundarySection(states=Compression(kind="topk", keep=0.1), gradients=Compression(kind="topk", keep=0.1))
    assert nearest_gap(model(), sparse, 8.0).kind == "topk"
    assert nearest_gap(model(subspace=SubspaceConfig(width=8)), BoundarySection(), 32.0).kind == "subspace"
