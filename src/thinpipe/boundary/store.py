"""Rows of float32 by key, as many as come: in memory, or in a file without a name that ends with the process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

_FIRST_ROWS = 16


class RowStore:
    def __init__(self, width: int, folder: Path | None) -> None:
        self.width, self.file = width, None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = TemporaryFile(dir=folder)  # noqa: SIM115  open as long as the store is
            finalize(self, self.file.close)
        self.places: dict[int, int] = {}
        self._before: dict[int, Tensor | None] | None = None
        """What stood where something was written since the mark; None for a new key."""
        self.rows = self._room_for(_FIRST_ROWS)

    def read(self, keys: Sequence[int]) -> Tensor:
        """[keys, width]; zeros for a key that was never written."""
        found = torch.zeros(len(keys), self.width)
        for row, key in zip(found, keys, strict=True):
            if key in self.places:
                row.copy_(self.rows[self.places[key]])
        return found

    def write(self, keys: Sequence[int], rows: Tensor) -> None:
        for key, row in zip(keys, rows.cpu(), strict=True):
            if self._before is not None and key not in self._before:
                self._before[key] = self.rows[self.places[key]].clone() if key in self.places else None
            place = self.places.setdefault(key, len(self.places))
            if place == len(self.rows):
                self._grow()
            self.rows[place] = row

    def mark(self) -> None:
        self._before = {}

    def go_back(self) -> None:
        """To what it was at the last mark. New keys have the last places, so that none is left empty."""
        for key, row in (self._before or {}).items():
            if row is None:
                del self.places[key]
            else:
                self.rows[self.places[key]] = row
        self._before = {}

    def state(self) -> dict[str, Tensor]:
        return {"keys": torch.tensor(list(self.places), dtype=torch.int64), "rows": self.rows[: len(self.places)]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.places, self._before = {}, None
        self.write(state["keys"].tolist(), state["rows"])

    def _grow(self) -> None:
        old = self.rows
        self.rows = self._room_for(2 * len(old))
        if self.file is None:
            self.rows[: len(old)] = old

    def _room_for(self, rows: int) -> Tensor:
        if self.file is None:
            return torch.zeros(rows, self.width)
        return torch.from_numpy(np.memmap(self.file, dtype=np.float32, mode="r+", shape=(rows, self.width)))
