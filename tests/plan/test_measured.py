"""The losses that a plan tells are those of the studies, and it tells none that was not measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import ModelSettings
from thinpipe.planning.measured_loss import MEASURED, describe_loss_gap, nearest_gap

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows_of(folder: str) -> list[list[str]]:
    text = (RESULTS / folder / f"{folder}.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("gap", MEASURED, ids=lambda gap: gap.record)
def test_each_figure_stands_in_the_results(gap):
    folder, _, name = gap.record.partition(": ")
    figure = f"{gap.percent:+.2f}"
    rows = [row for row in rows_of(folder) if row[0] == name and f"{gap.million_tokens:.2f}" in row]
    rows = [row for row in rows if f"{gap.compression_ratio:.1f}x" in row]
    assert any(cell.split(" ")[0] == figure for row in rows for cell in row), rows
    if gap.seeds > 1:
        assert any(str(gap.seeds) in row for row in rows)


def model(**changes):
    return ModelSettings(preset="llama-10m", boundaries=(2, 4, 6), **changes).resolve(4096)


TABLES = ProjectionConfig(width=26, token_prior_rank=64, embedding_rank=64, token_prior_window=4)
NO_TABLES = {"token_prior_rank": 0, "embedding_rank": 0, "token_prior_window": 1}


def test_a_keel_is_told_its_own_figure_and_a_distant_ratio_none():
    keel = model(projection=TABLES)
    assert nearest_gap(keel, BoundaryConfig(), 32.0).percent == 0.58
    assert nearest_gap(keel, BoundaryConfig(), 17.0).percent == -0.19
    assert nearest_gap(keel, BoundaryConfig(), 128.0) is None
    not_measured = "not measured for keel with tables that look back at 128.0 times fewer bytes"
    assert describe_loss_gap(keel, BoundaryConfig(), 128.0) == not_measured
    assert "3 seeds" in describe_loss_gap(keel, BoundaryConfig(), 32.0)


@pytest.mark.parametrize(
    ("changes", "percent"),
    [
        ({"token_prior_window": 1}, 2.03),
        (NO_TABLES, None),
        ({"embedding_rank": 0}, None),
        ({"bigram_rows": 64}, None),
        ({"kind": "bottleneck"}, -2.51),
        ({"kind": "bottleneck"} | NO_TABLES, 5.60),
        ({"kind": "bottleneck"} | NO_TABLES | {"embedding_rank": 64}, None),
        ({"kind": "learned"}, None),
        ({"kind": "learned", "embedding_rank": 0}, None),
        ({"kind": "learned", "embedding_rank": 0, "token_prior_window": 1}, 1.80),
    ],
)
def test_what_segments_know_by_themselves_makes_another_figure_or_none(changes, percent):
    gap = nearest_gap(model(projection=replace(TABLES, **changes)), BoundaryConfig(), 32.0)
    assert (gap and gap.percent) == percent


def test_a_keel_with_more_boundaries_is_told_that_they_add_up():
    four = model(projection=TABLES)
    eight = replace(four, boundaries=(1, 2, 3, 4, 5, 6, 7))
    assert "grows" not in describe_loss_gap(four, BoundaryConfig(), 32.0)
    assert "grows" in describe_loss_gap(eight, BoundaryConfig(), 32.0)


def test_dense_in_bf16_loses_nothing_and_in_int8_is_not_measured():
    assert describe_loss_gap(model(), BoundaryConfig(forward="bf16", backward="bf16"), 1.0).startswith("none")
    assert describe_loss_gap(model(), BoundaryConfig(forward="int8", backward="int8"), 1.9).startswith(
        "not measured for dense"
    )


def test_kinds_are_not_mixed_up():
    sparse = BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.1), gradients=CompressionConfig(kind="topk", keep=0.1)
    )
    assert nearest_gap(model(), sparse, 8.0).kind == "topk"
    assert nearest_gap(model(subspace=SubspaceConfig(width=16)), BoundaryConfig(), 15.5).seeds == 3
    assert nearest_gap(model(subspace=SubspaceConfig(width=8)), BoundaryConfig(), 32.0).kind == "subspace"
