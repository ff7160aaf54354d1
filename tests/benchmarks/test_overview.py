"""The README's figure: bytes and speeds of its bars."""

import pytest

from benchmarks.overview import draw, methods, tokens_per_second


def test_bytes_are_those_of_the_table_of_message_sizes(tmp_path):
    dense, int4, keel, subspace = methods().values()
    assert (round(dense), round(subspace)) == (16_387, 163)  # benchmarks/results/message_sizes_2026-11-15.md
    assert dense / int4 == pytest.approx(4, rel=0.01)
    assert 32 <= dense / keel < 32.2
    assert tokens_per_second(dense) == pytest.approx(20e6 / 8 / 16_387, rel=1e-3)
    draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 20_000
