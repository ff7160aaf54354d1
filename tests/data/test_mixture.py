"""Samples of several sources follow the weights at every moment, as a pure function of the position; a source alone is
read as without a mixture."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_samples import Numbers
from thinpipe.config.run_data import DataConfig, MixtureSource
from thinpipe.core.errors import UserError
from thinpipe.data import Batches, Cursor, EvenlySpacedBatches
from thinpipe.data.mixture import Mixture

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@settings(deadline=None)
@given(weights=WEIGHTS)
def test_no_source_is_ever_a_whole_sample_from_its_share(weights: list[int]) -> None:
    positions = np.arange(3 * sum(weights))
    sources, ranks = Mixture(weights).at(positions)
    for source, weight in enumerate(weights):
        had = np.cumsum(sources == source)
        assert np.abs(had - weight / sum(weights) * (positions + 1)).max() < 1
        assert ranks[sources == source].tolist() == list(range(int(had[-1])))


@settings(deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**12), count=st.integers(1, 50))
def test_a_position_depends_on_nothing_but_itself(weights: list[int], start: int, count: int) -> None:
    mixture = Mixture(weights)
    sources, ranks = mixture.at(start + np.arange(count))
    one_by_one = [Mixture(weights).at(np.array([start + offset])) for offset in range(count)]
    assert sources.tolist() == [int(source[0]) for source, _ in one_by_one]
    assert ranks.tolist() == [int(rank[0]) for _, rank in one_by_one]


def test_the_sources_of_a_cycle() -> None:
    assert Mixture([1, 1]).at(np.arange(6))[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert Mixture([3, 1]).at(np.arange(8))[0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    sources, _ = Mixture([90, *[1] * 10]).at(np.arange(1000))
    rare = np.flatnonzero(sources)
    assert np.diff(rare).min() > 1  # not ten in a row


def batches(seed: int = 3, **changes: object) -> Batches:
    given: dict = {"seq_len": 10, "batch_size": 4, "seed": seed, "weights": (3, 1), **changes}
    return Batches(Numbers(301), Numbers(51), **given)


def test_each_source_is_read_epoch_by_epoch() -> None:
    ids = batches().sample_ids(0, 4 * 30)
    first, second = ids[ids < 30], ids[ids >= 30] - 30
    assert [sorted(first[epoch * 30 :][:30]) for epoch in range(3)] == [list(range(30))] * 3
    assert [sorted(second[epoch * 5 :][:5]) for epoch in range(6)] == [list(range(5))] * 6
    assert len({tuple(second[epoch * 5 :][:5]) for epoch in range(6)}) > 1
    assert first[:30].tolist() == Batches(Numbers(301), seq_len=10, batch_size=1, seed=3).sample_ids(0, 30).tolist()
    alone = Batches(Numbers(51), seq_len=10, batch_size=1, seed=3).sample_ids(0, 30)
    assert second.tolist() != alone.tolist()  # two sources of one size have orders of their own


def test_leases_of_any_size_add_up_to_the_whole() -> None:
    whole = batches().sample_ids(0, 500)
    cuts = [0, 1, 7, 100, 101, 333, 500]
    parts = [batches().sample_ids(start, stop - start) for start, stop in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_batch_holds_the_samples_of_its_ids() -> None:
    batch = batches().batch_at(Cursor(samples_seen=37))
    for row, sample in zip(batch.ids_BW, batch.sample_ids_B.tolist(), strict=True):
        start = 10 * (sample if sample < 30 else sample - 30)
        assert row.tolist() == list(range(start, start + 11))
    assert batch.next_cursor == Cursor(samples_seen=41)
    assert 30 <= max(batch.sample_ids_B) < 35


def test_validation_takes_batches_of_each_source() -> None:
    spaced = EvenlySpacedBatches(Numbers(1001), Numbers(201), Numbers(30), seq_len=10, batch_size=4, count=6)
    assert spaced.counts == [6, 5, 0]
    assert [int(ids_BW[0, 0]) for ids_BW in spaced] == [0, 160, 320, 480, 640, 800, 0, 40, 80, 120, 160]
    assert len(spaced) == 11
    with pytest.raises(IndexError, match=r"batch 11 does not lie in 0 \.\.\. 10"):
        spaced[11]


def mixture(*weights: float) -> DataConfig:
    named = zip("abcdefgh", weights, strict=False)
    return DataConfig(mixture=tuple(MixtureSource(path=name, weight=weight) for name, weight in named))  # type: ignore[arg-type]


def test_weights_are_exact() -> None:
    assert mixture(0.7, 0.3).weights == mixture(7, 3).weights == mixture(1.4, 0.6).weights == (7, 3)
    assert mixture(1, 2, 3).weights == (1, 2, 3)
    assert mixture(1e-3, 0.999).weights == (1, 999)
    assert mixture(5).weights == DataConfig().weights == (1,)


def test_what_cannot_be_meant_is_an_error() -> None:
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UserError, match="the weight of a must be above 0"):
            mixture(weight)
    with pytest.raises(UserError, match=r"repeat after 20,001 samples, and at most 10,000 are possible: write"):
        mixture(1, 1.0001)
    with pytest.raises(UserError, match=r"data.path x and data.mixture exclude each other: leave one out"):
        DataConfig(path="x", mixture=mixture(1).mixture)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data.mixture has a twice: name it once"):
        DataConfig(mixture=(*mixture(1).mixture, *mixture(2).mixture))  # type: ignore[misc]
    with pytest.raises(UserError, match=r"data.mixture is empty"):
        DataConfig(mixture=())
    with pytest.raises(ValueError, match="there are 1 sources and 2 weights"):
        Batches(Numbers(30), seq_len=2, batch_size=1, seed=0, weights=(1, 2))
