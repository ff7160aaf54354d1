"""Growing key-value store of float32 rows, in memory or in an anonymous temporary file (memory-mapped). The file is
deleted when the process exits. Holds the codec state of AQ-SGD."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

_INITIAL_ROWS = 16


class RowStore:
    def __init__(self, width: int, folder: Path | None) -> None:
        self.width, self.file = width, None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = TemporaryFile(dir=folder)  # noqa: SIM115  stays open for the store's lifetime
            finalize(self, self.file.close)
        self.row_of_key: dict[int, int] = {}
        self._undo_log: dict[int, Tensor | None] | None = None
        """Previous row of each key written since the last snapshot; None for a new key. None before any snapshot."""
        self.rows = self._allocate(_INITIAL_ROWS)

    def read(self, keys: Sequence[int]) -> Tensor:
        """Rows of the keys, [len(keys), width]; zeros for a key that was never written."""
        found = torch.zeros(len(keys), self.width, dtype=torch.float32)
        for row, key in zip(found, keys, strict=True):
            if key in self.row_of_key:
                row.copy_(self.rows[self.row_of_key[key]])
        return found

    def write(self, keys: Sequence[int], rows: Tensor) -> None:
        for key, row in zip(keys, rows.cpu(), strict=True):
            if self._undo_log is not None and key not in self._undo_log:
                self._undo_log[key] = self.rows[self.row_of_key[key]].clone() if key in self.row_of_key else None
            place = self.row_of_key.setdefault(key, len(self.row_of_key))
            if place == len(self.rows):
                self._grow()
            self.rows[place] = row

    def snapshot(self) -> None:
        self._undo_log = {}

    def rollback(self) -> None:
        """Restores the content of the last snapshot. New keys occupy the last rows, so removing them leaves no gaps."""
        for key, row in (self._undo_log or {}).items():
            if row is None:
                del self.row_of_key[key]
            else:
                self.rows[self.row_of_key[key]] = row
        self._undo_log = {}

    def state(self) -> dict[str, Tensor]:
        return {
            "keys": torch.tensor(list(self.row_of_key), dtype=torch.int64),
            "rows": self.rows[: len(self.row_of_key)],
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.row_of_key, self._undo_log = {}, None
        self.write(state["keys"].tolist(), state["rows"])

    def _grow(self) -> None:
        old = self.rows
        self.rows = self._allocate(2 * len(old))
        if self.file is None:
            self.rows[: len(old)] = old

    def _allocate(self, rows: int) -> Tensor:
        if self.file is None:
            return torch.zeros(rows, self.width, dtype=torch.float32)
        return torch.from_numpy(np.memmap(self.file, dtype=np.float32, mode="r+", shape=(rows, self.width)))
