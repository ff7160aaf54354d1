"""Frozen tables T_fixed: a fixed D-wide row per token id (or per position), which every segment holds a copy of.

Never trained and never part of boundary messages. Three kinds: random signs, 1 bit per entry, from integer arithmetic
that gives the same bits on every platform; a Gaussian table, drawn once and then distributed; and a given table, such
as the part of a trained embedding outside span(U).
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.core.hashing import array_sha256
from thinpipe.core.seeds import derive_seed
from thinpipe.subspace.normal import fill_normal


class FixedTable(nn.Module):
    """Base class: `table(ids, dtype)` returns one row of `dim` entries per id, with standard deviation `std`."""

    def __init__(self, rows: int, dim: int, *, std: float, seed: int) -> None:
        super().__init__()
        self.rows, self.dim, self.std, self.seed = rows, dim, std, seed

    def fill(self) -> None:
        """Computes the content of the buffers, after they have been allocated."""
        raise NotImplementedError

    def content(self) -> Tensor:
        """The buffer that defines the table."""
        raise NotImplementedError

    @property
    def hash(self) -> str:
        """sha256 of the stored content and its scale."""
        return f"{array_sha256(self.content().cpu().numpy())}x{self.std!r}"


class SignTable(FixedTable):
    """Entries ±std from packed bits: 128k rows of 4096 take 67 MB instead of 2.1 GB; no float table is ever built.

    Bit j of row v is bit (j mod 64) of word v·⌈dim/64⌉ + ⌊j/64⌋ of the Philox4x64-10 stream keyed by the seed, so a
    row does not depend on how many rows there are.
    """

    def __init__(self, rows: int, dim: int, *, std: float, seed: int) -> None:
        super().__init__(rows, dim, std=std, seed=seed)
        self.bits: Tensor
        self.signs_of_byte: Tensor
        self.register_buffer("bits", torch.empty(rows, -(-dim // 8), dtype=torch.uint8), persistent=False)
        self.register_buffer("signs_of_byte", torch.empty(256, 8, dtype=torch.int8), persistent=False)
        if not self.bits.is_meta:
            self.fill()

    def fill(self) -> None:
        words_per_row = -(-self.dim // 64)
        stream = np.random.Philox(key=derive_seed(self.seed, "signs"))
        words = stream.random_raw(self.rows * words_per_row).astype("<u8", copy=False)
        row_bytes = words.view(np.uint8).reshape(self.rows, words_per_row * 8)[:, : self.bits.shape[1]]
        self.bits.copy_(torch.from_numpy(np.ascontiguousarray(row_bytes)))
        bits_of_byte = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self.signs_of_byte.copy_(torch.from_numpy(bits_of_byte.astype(np.int8) * 2 - 1))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        packed = self.bits[ids].int()
        signs = F.embedding(packed, self.signs_of_byte.to(dtype) * self.std)
        return signs.flatten(-2)[..., : self.dim]

    def content(self) -> Tensor:
        return self.bits


class FloatTable(FixedTable):
    """A float32 table, saved in checkpoints and sent to peers."""

    def __init__(self, rows: int, dim: int, *, std: float, seed: int) -> None:
        super().__init__(rows, dim, std=std, seed=seed)
        self.table: Tensor
        self.register_buffer("table", torch.empty(rows, dim, dtype=torch.float32))
        if not self.table.is_meta:
            self.fill()

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.table).to(dtype)

    def content(self) -> Tensor:
        return self.table


class GaussianTable(FloatTable):
    """Gaussian entries, drawn once and then distributed: another platform may draw other numbers from the same seed."""

    def fill(self) -> None:
        fill_normal(self.table, self.std, derive_seed(self.seed, "gaussian"))


class GivenTable(FloatTable):
    """A table that is loaded with the weights; `std` and `seed` are unused. NaN until loaded, so that a missing load is
    noticed."""

    def fill(self) -> None:
        self.table.fill_(torch.nan)


FIXED_TABLES: dict[str, Callable[..., FixedTable]] = {
    "signs": SignTable,
    "gaussian": GaussianTable,
    "given": GivenTable,
}
