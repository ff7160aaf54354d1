"""Windows are exact across files, every epoch visits each sample once, and resuming equals never having stopped."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import write_numbers
from thinpipe.data import Batches, Cursor, DataError, EvenlySpacedBatches, Windows, sequential_batches


class Numbers:
    """Tokens whose id is their position."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.count
        return np.arange(start, stop)


def expected_window(sample: int, seq_len: int) -> np.ndarray:
    return np.arange(sample * seq_len, (sample + 1) * seq_len + 1)


@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 120), seq_len=st.integers(1, 60), max_shard_tokens=st.integers(1, 50))
def test_windows_across_files(
    tmp_path_factory: pytest.TempPathFactory, count: int, seq_len: int, max_shard_tokens: int
) -> None:
    seq_len = min(seq_len, count - 1)
    tokens = write_numbers(tmp_path_factory.mktemp("tokens"), count, max_shard_tokens=max_shard_tokens)
    whole = np.append(np.arange(1, count), 0)
    windows = Windows(tokens, seq_len)
    read = windows.read(np.arange(len(windows)))
    assert len(windows) == (count - 1) // seq_len
    assert np.array_equal(read, [whole[i * seq_len : (i + 1) * seq_len + 1] for i in range(len(windows))])


def test_the_last_label_is_the_next_first_input() -> None:
    windows = Windows(Numbers(101), 10)
    read = windows.read(np.arange(len(windows)))
    assert len(windows) == 10
    assert np.array_equal(read[:-1, -1], read[1:, 0])
    assert np.array_equal(np.concatenate([read[0, :1], read[:, 1:].ravel()]), np.arange(101))


def test_a_window_that_is_not_full_is_dropped() -> None:
    assert [len(Windows(Numbers(count), 10)) for count in (11, 20, 21, 30, 31)] == [1, 1, 2, 2, 3]


@settings(deadline=None)
@given(count=st.integers(2, 500), seq_len=st.integers(1, 50), batch_size=st.integers(1, 40), seed=st.integers(0, 9))
def test_each_epoch_visits_every_sample_once(count: int, seq_len: int, batch_size: int, seed: int) -> None:
    batches = Batches(Numbers(count), seq_len=min(seq_len, count - 1), batch_size=batch_size, seed=seed)
    samples, cursor, seen = len(batches.samples), Cursor(), []
    while cursor.samples_seen < 3 * samples:
        batch = batches.batch_at(cursor)
        assert np.array_equal(batch.ids_BW, [expected_window(s, batches.samples.seq_len) for s in batch.sample_ids_B])
        seen += batch.sample_ids_B.tolist()
        cursor = batch.next_cursor
    for epoch in range(3):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(deadline=None)
@given(first=st.integers(1, 30), second=st.integers(1, 30))
def test_the_order_does_not_depend_on_the_batch_size(first: int, second: int) -> None:
    def order(batch_size: int) -> list[int]:
        batches = Batches(Numbers(301), seq_len=10, batch_size=batch_size, seed=5)
        cursor, seen = Cursor(), []
        while len(seen) < 70:
            batch = batches.batch_at(cursor)
            seen += batch.sample_ids_B.tolist()
            cursor = batch.next_cursor
        return seen[:70]

    assert order(first) == order(second)


def test_epochs_and_seeds_differ() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return Batches(Numbers(1001), seq_len=10, batch_size=1, seed=seed).sample_ids(100 * number, 100).tolist()

    orders = [epoch(number, seed) for number in range(4) for seed in range(4)]
    assert len({tuple(order) for order in orders}) == 16


@settings(deadline=None)
@given(steps=st.integers(0, 60), batch_size=st.integers(1, 9))
def test_resuming_at_any_cursor_equals_never_stopping(steps: int, batch_size: int) -> None:
    def new() -> Batches:
        return Batches(Numbers(301), seq_len=10, batch_size=batch_size, seed=3)

    running, cursor = new(), Cursor()
    for _ in range(steps):
        cursor = running.batch_at(cursor).next_cursor
    saved = json.dumps(dataclasses.asdict(cursor))
    resumed = Cursor(**json.loads(saved))
    for _ in range(5):
        ours, theirs = running.batch_at(cursor), new().batch_at(resumed)
        assert np.array_equal(ours.ids_BW, theirs.ids_BW)
        assert np.array_equal(ours.sample_ids_B, theirs.sample_ids_B)
        assert ours.next_cursor == theirs.next_cursor
        cursor, resumed = ours.next_cursor, theirs.next_cursor


def test_types() -> None:
    batches = Batches(Numbers(301), seq_len=10, batch_size=7, seed=0)
    batch = batches.batch_at(Cursor())
    assert (batch.ids_BW.dtype, batch.ids_BW.shape, batch.sample_ids_B.dtype) == (np.int64, (7, 11), np.int64)


def test_a_billion_samples_take_no_memory_and_no_time() -> None:
    batches = Batches(Numbers(4096 * 10**9 + 1), seq_len=4096, batch_size=4, seed=0)
    batch = batches.batch_at(Cursor(samples_seen=10**9 - 2))
    assert np.array_equal(batch.ids_BW, [expected_window(s, 4096) for s in batch.sample_ids_B])


@pytest.mark.parametrize("batch_size", [1, 3, 29, 30, 64])
def test_validation_takes_each_sample_once_and_in_order(batch_size: int) -> None:
    batches = list(sequential_batches(Numbers(305), seq_len=10, batch_size=batch_size))
    assert np.concatenate([sample_ids for _, sample_ids in batches]).tolist() == list(range(30))
    assert np.array_equal(np.concatenate([ids for ids, _ in batches]), [expected_window(s, 10) for s in range(30)])
    assert {len(ids) for ids, _ in batches[:-1]} <= {batch_size}


def test_what_cannot_work_says_why() -> None:
    with pytest.raises(DataError, match="has 10 tokens, but one sample of seq_len 10 needs 11: lower seq_len"):
        Windows(Numbers(10), 10)
    with pytest.raises(ValueError, match="seq_len 0"):
        Windows(Numbers(10), 0)
    with pytest.raises(ValueError, match="batch_size 0"):
        Batches(Numbers(10), seq_len=2, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="batch_size -1"):
        next(sequential_batches(Numbers(10), seq_len=2, batch_size=-1))
    with pytest.raises(ValueError, match="starts at 0"):
        Cursor(samples_seen=-1)
    with pytest.raises(IndexError, match=r"sample 4 does not lie in 0 \.\.\. 3"):
        Windows(Numbers(9), 2).read(np.array([4]))


def test_a_part_of_the_text_is_spread_over_all_of_it():
    text = Numbers(1001)  # 100 samples of 10, 25 batches of 4
    starts = [int(ids_BW[0, 0]) for ids_BW in EvenlySpacedBatches(text, seq_len=10, batch_size=4, count=5)]
    assert starts == [0, 200, 400, 600, 800]
    everything = list(EvenlySpacedBatches(text, seq_len=10, batch_size=4, count=100))
    assert [int(ids_BW[0, 0]) for ids_BW in everything] == list(range(0, 1000, 40))
    assert list(EvenlySpacedBatches(Numbers(30), seq_len=10, batch_size=4, count=5)) == []
