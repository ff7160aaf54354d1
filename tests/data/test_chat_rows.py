"""Rows of chats: every chat in exactly one row, padding that nobody trains on, and the same order after a resume."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chats import write_chats
from tests.data.conftest import write_numbers
from thinpipe.core.token_flags import BEGINS, ID_MASK, TRAINED
from thinpipe.data import Batches, Cursor, DataError, EvenlySpacedBatches, Tokens, sequential_batches
from thinpipe.data.chat.rows import ChatRows, pack

LENGTHS = [17, 3, 9, 9, 2, 30, 12, 5, 5, 31, 8, 2]
SEQ_LEN = 30


@pytest.fixture
def chats(tmp_path: Path) -> Tokens:
    """In shards of 100 tokens, so that chats span two."""
    return write_chats(tmp_path / "chats", LENGTHS)


def chats_of(tokens: Tokens) -> list[list[int]]:
    flagged = tokens.read(0, len(tokens))
    return [part.tolist() for part in np.split(flagged, np.flatnonzero(flagged & BEGINS)[1:])]


def test_chats_come_back_from_the_shards_with_their_flags(chats: Tokens) -> None:
    assert len(chats.manifest.shards) > 1
    assert np.diff(chats.chat_starts()).tolist() == LENGTHS == list(map(len, chats_of(chats)))
    assert all(not chat[0] & TRAINED and chat[-1] & TRAINED for chat in chats_of(chats))
    trained = sum(bool(token & TRAINED) for chat in chats_of(chats) for token in chat)
    assert chats.manifest.chat.trained_tokens == trained
    assert chats.manifest.chat.longest_chat == 31


def test_one_chat_in_a_row(chats: Tokens) -> None:
    rows = ChatRows(chats, SEQ_LEN, packing=False)
    found = rows.read(np.arange(len(rows)))
    assert found.shape == (12, SEQ_LEN + 1)
    for row, chat in zip(found.tolist(), chats_of(chats), strict=True):
        padding = [BEGINS, *[0] * SEQ_LEN][: SEQ_LEN + 1 - len(chat)]
        assert row == chat + padding


def test_packed_rows_have_every_chat_once_and_whole(chats: Tokens) -> None:
    rows = ChatRows(chats, SEQ_LEN, packing=True)
    assert len(rows) == 5  # 133 tokens in rows of 31
    found = []
    for row in rows.read(np.arange(len(rows))):
        for part in np.split(row, np.flatnonzero(row & BEGINS)[1:]):
            if part[0] != BEGINS:  # padding
                found.append(part.tolist())
            else:
                assert not (part[1:] != 0).any()
    assert sorted(found) == sorted(chats_of(chats))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_fills_rows_and_never_more_than_that(lengths: list[int]) -> None:
    items, begins = pack(np.array(lengths), 20)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[item] for item in items[a:b]) for a, b in itertools.pairwise(begins)]
    assert max(filled) <= 20
    assert sum(sorted(filled)[:2]) > 20 or len(filled) == 1, "two rows would fit into one"
    assert np.array_equal(items, pack(np.array(lengths), 20)[0])


@pytest.mark.parametrize("packing", [False, True])
def test_batches_visit_each_row_once_an_epoch_and_resume_exactly(chats: Tokens, packing: bool) -> None:
    batches = Batches(chats, seq_len=SEQ_LEN, batch_size=3, seed=5, packing=packing)
    cursor, seen, read = Cursor(), [], []
    for _ in range(10):
        batch = batches.batch_at(cursor)
        seen += batch.sample_ids_B.tolist()
        read.append(batch.ids_BW)
        cursor = batch.next_cursor
    rows = len(batches.samples)
    assert sorted(seen[:rows]) == sorted(seen[rows : 2 * rows]) == list(range(rows))
    assert seen[:rows] != seen[rows : 2 * rows]
    again = Batches(chats, seq_len=SEQ_LEN, batch_size=3, seed=5, packing=packing)
    assert np.array_equal(again.batch_at(Cursor(samples_seen=12)).ids_BW, read[4])
    assert all((ids & ID_MASK).max() < 64 for ids in read)


def test_validation_reads_rows_too(chats: Tokens) -> None:
    rows = ChatRows(chats, SEQ_LEN, packing=False)
    spaced = EvenlySpacedBatches(chats, seq_len=SEQ_LEN, batch_size=4, count=9)
    whole = [ids for ids, _ in sequential_batches(chats, seq_len=SEQ_LEN, batch_size=4)]
    assert len(spaced) == len(whole) == 3
    for index in range(3):
        assert np.array_equal(spaced[index], rows.read(np.arange(4 * index, 4 * index + 4)))
        assert np.array_equal(whole[index], spaced[index])


def test_a_chat_longer_than_a_row_and_packing_of_plain_text_are_refused(chats: Tokens, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a chat of 31 tokens, .* holds 30: set training.seq_len to 30, or"):
        Batches(chats, seq_len=29, batch_size=1, seed=0)
    with pytest.raises(DataError, match=r"training.packing is for chats"):
        Batches(write_numbers(tmp_path / "plain", 100), seq_len=10, batch_size=1, seed=0, packing=True)
