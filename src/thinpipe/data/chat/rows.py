"""Rows of chats for batches: one chat in a row, or several packed into one; the rest of a row is padding.

Which chats share a row depends on their lengths alone, so that the order of rows is a permutation like that of samples
of plain text, and resuming is exact. Shape suffixes: B rows, W = seq_len + 1 ids.
"""

import bisect

import numpy as np
import numpy.typing as npt

from thinpipe.core.errors import DataError
from thinpipe.core.token_flags import BEGINS
from thinpipe.data.shards import Tokens

Ids = npt.NDArray[np.int64]


class ChatRows:
    """Rows by number. Their ids have flags (`core.token_flags`); padding is not trained on."""

    def __init__(self, tokens: Tokens, seq_len: int, *, packing: bool) -> None:
        """Raises DataError if a chat is longer than a row."""
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be at least 1")
        self.tokens, self.seq_len = tokens, seq_len
        self._starts = tokens.chat_starts()
        lengths = np.diff(self._starts)
        if (longest := int(lengths.max())) > seq_len + 1:
            raise DataError(
                f"{tokens.folder} has a chat of {longest:,} tokens, and a row of training.seq_len {seq_len:,} holds "
                f"{seq_len + 1:,}: set training.seq_len to {longest - 1}, or tokenize with --seq-len {seq_len}, "
                "which cuts longer chats"
            )
        whole = np.arange(len(lengths), dtype=np.int64)
        self._chats, self._first_of_row = (
            pack(lengths, seq_len + 1) if packing else (whole, np.arange(len(lengths) + 1, dtype=np.int64))
        )
        """Chats in the order of the rows, and where in that order each row begins."""

    def __len__(self) -> int:
        return len(self._first_of_row) - 1

    def read(self, sample_ids_B: Ids) -> Ids:
        padding = self.tokens.manifest.vocabulary.end_of_text_id
        ids_BW = np.full((len(sample_ids_B), self.seq_len + 1), padding, np.int64)
        for row, sample in enumerate(sample_ids_B.tolist()):
            if not 0 <= sample < len(self):
                raise IndexError(f"row {sample} does not lie in 0 ... {len(self) - 1}")
            place = 0
            for chat in self._chats[self._first_of_row[sample] : self._first_of_row[sample + 1]].tolist():
                ids = self.tokens.read(int(self._starts[chat]), int(self._starts[chat + 1]))
                ids_BW[row, place : place + len(ids)] = ids
                place += len(ids)
            ids_BW[row, place : place + 1] |= BEGINS  # so that padding is no part of the last chat
        return ids_BW


def pack(lengths: Ids, capacity: int) -> tuple[Ids, Ids]:
    """Puts items of these lengths into rows of this capacity: the longest first, each into the fullest row in which
    it fits. The items in the order of the rows, and where in that order each row begins, and the last one ends."""
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those of rows_by_room, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        rows[row].append(item)
        if room - length not in rows_by_room:
            bisect.insort(rooms, room - length)
        rows_by_room.setdefault(room - length, []).append(row)
    begins = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return np.array([item for row in rows for item in row], np.int64), begins
