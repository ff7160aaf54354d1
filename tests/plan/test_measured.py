"""The losses that a plan tells are those of the studies, and it tells none that was not measured."""

from dataclasses import replace
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


TABLES = NeckConfig(width=26, anchor_rank=64, first_rank=64, anchor_reach=4)
NO_TABLES = {"anchor_rank": 0, "first_rank": 0, "anchor_reach": 1}


def test_a_keel_is_told_its_own_figure_and_a_distant_ratio_none():
    keel = model(neck=TABLES)
    assert nearest_gap(keel, BoundarySection(), 32.0).percent == 0.58
    assert nearest_gap(keel, BoundarySection(), 17.0).percent == -0.19
    assert nearest_gap(keel, BoundarySection(), 128.0) is None
    not_measured = "not measured for keel with tables that look back at 128.0 times fewer bytes"
    assert say_gap(keel, BoundarySection(), 128.0) == not_measured
    assert "3 seeds" in say_gap(keel, BoundarySection(), 32.0)


@pytest.mark.parametrize(
    ("changes", "percent"),
    [
        ({"anchor_reach": 1}, 2.03),
        (NO_TABLES, None),
        ({"first_rank": 0}, None),
        ({"ngram_rows": 64}, None),
        ({"kind": "bottleneck"}, -2.51),
        ({"kind": "bottleneck"} | NO_TABLES, 5.60),
        ({"kind": "bottleneck"} | NO_TABLES | {"first_rank": 64}, None),
        ({"kind": "learned"}, None),
        ({"kind": "learned", "first_rank": 0}, None),
        ({"kind": "learned", "first_rank": 0, "anchor_reach": 1}, 1.80),
    ],
)
def test_what_segments_know_by_themselves_makes_another_figure_or_none(changes, percent):
    gap = nearest_gap(model(neck=replace(TABLES, **changes)), BoundarySection(), 32.0)
    assert (gap and gap.percent) == percent


def test_a_keel_with_more_boundaries_is_told_that_they_add_up():
    four = model(neck=TABLES)
    eight = replace(four, boundaries=(1, 2, 3, 4, 5, 6, 7))
    assert "grows" not in say_gap(four, BoundarySection(), 32.0)
    assert "grows" in say_gap(eight, BoundarySection(), 32.0)


def test_dense_in_bf16_loses_nothing_and_in_int8_is_not_measured():
    assert say_gap(model(), BoundarySection(forward="bf16", backward="bf16"), 1.0).startswith("none")
    assert say_gap(model(), BoundarySection(forward="int8", backward="int8"), 1.9).startswith("not measured for dense")


def test_kinds_are_not_mixed_up():
    sparse = BoundarySection(states=Compression(kind="topk", keep=0.1), gradients=Compression(kind="topk", keep=0.1))
    assert nearest_gap(model(), sparse, 8.0).kind == "topk"
    assert nearest_gap(model(subspace=SubspaceConfig(width=16)), BoundarySection(), 15.5).seeds == 3
    assert nearest_gap(model(subspace=SubspaceConfig(width=8)), BoundarySection(), 32.0).kind == "subspace"
