"""The benchmark of states with giant channels: what it says holds, and its record has the bytes of today."""

from pathlib import Path

from benchmarks.published_boundaries import (
    ENCODINGS,
    WHOLE,
    PublishedBoundaries,
    byte_table,
    error_table,
    measure,
    states,
)
from thinpipe.config.boundary import PRESETS

ROOT = Path(__file__).parents[2]
RECORD = next((ROOT / "benchmarks" / "results").glob("published_boundaries_*.md"))
SIZE = {"width": 1024, "tokens": 40}


def test_giants_are_few_and_ordinary_channels_have_none():
    values_BTW, ordinary_W = states(**SIZE, seed=0)
    assert int(ordinary_W.sum()) == 1024 - 6
    assert float(values_BTW[..., ordinary_W].abs().max()) < 10 < 100 < float(values_BTW.abs().max())


def test_presets_err_least_of_their_bits():
    for preset, encoding in (("tuning", "int8, rotated"), ("tuning-thin", "int4, rotated, tiles of 128")):
        best = measure(PRESETS[preset][0], **SIZE, seed=0)
        bare = measure(ENCODINGS[encoding], **SIZE, seed=0)
        assert best.first < 0.003 < 0.05 < bare.first
        assert best.others < 0.75 * bare.others
        assert best.worst < 0.25 * bare.worst


def columns(lines, count):
    return [line.split("|")[1 : 1 + count] for line in lines if line.startswith("|")]


def test_the_record_has_every_row_and_the_bytes_that_are_stated_today():
    recorded = RECORD.read_text().splitlines()
    options = PublishedBoundaries(seeds=0)  # bytes alone
    assert columns(byte_table(options.tokens), 4) == columns(recorded, 4)[-6:]
    rows = columns(recorded, 3)[: 2 + len(ENCODINGS) * len(WHOLE)]
    small = columns(error_table(PublishedBoundaries(width=128, seeds=1)), 3)
    assert [row[:2] for row in small] == [row[:2] for row in rows]


def test_the_page_of_boundaries_states_the_bytes_of_the_presets():
    page = (ROOT / "docs" / "concepts" / "boundary.md").read_text()
    for preset in PRESETS:
        (stated,) = (row[1:] for row in columns(byte_table(PublishedBoundaries().tokens), 4) if f'"{preset}"' in row[0])
        (row,) = (line for line in page.splitlines() if line.startswith(f'| `"{preset}"`'))
        assert row.split("|")[3:6] == stated
