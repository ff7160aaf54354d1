"""Batches of samples from a token sequence, as a pure function of a cursor: resuming is exact by construction.

Sample i of a plain text is the window of seq_len + 1 ids that starts at i * seq_len, so the last label of a sample is
the first input of the next one. Samples of chats are rows (`data.chat.rows`), whose ids have flags. Each epoch visits
every sample once, in an order that depends on seed and epoch alone, not on the batch size. Several sources are mixed by
weight (`data.mixture`), each with epochs of its own. Shape suffixes: B samples, W = seq_len + 1 ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from thinpipe.core.errors import DataError
from thinpipe.core.seeds import derive_seed
from thinpipe.data.chat.rows import ChatRows
from thinpipe.data.mixture import Mixture
from thinpipe.data.permutation import Permutation
from thinpipe.data.shards import Tokens

Ids = npt.NDArray[np.int64]


class TokenSequence(Protocol):
    """A sequence of token ids from which samples are cut, such as `shards.Tokens`."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ids: ...


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position of a run in its data: the number of samples seen, from which sources, epochs and positions in them
    follow. Saved in every checkpoint."""

    samples_seen: int = 0

    def __post_init__(self) -> None:
        if self.samples_seen < 0:
            raise ValueError(f"samples_seen cannot be {self.samples_seen}: a run starts at 0")


class Batch(NamedTuple):
    """`ids_BW[:, :-1]` are inputs and `ids_BW[:, 1:]` labels; `next_cursor` is the cursor of the next batch."""

    ids_BW: Ids
    sample_ids_B: Ids
    next_cursor: Cursor


class Windows:
    """The samples of a token sequence, by sample id. An incomplete last window is dropped."""

    def __init__(self, tokens: TokenSequence, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be at least 1")
        if len(tokens) <= seq_len:
            raise DataError(
                f"the data has {len(tokens):,} tokens, but one sample of seq_len {seq_len:,} needs {seq_len + 1:,}: "
                "lower seq_len or prepare more text"
            )
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def read(self, sample_ids_B: Ids) -> Ids:
        ids_BW = np.empty((len(sample_ids_B), self.seq_len + 1), np.int64)
        for row, sample in enumerate(sample_ids_B.tolist()):
            if not 0 <= sample < len(self):
                raise IndexError(f"sample {sample} does not lie in 0 ... {len(self) - 1}")
            start = sample * self.seq_len
            ids_BW[row] = self.tokens.read(start, start + self.seq_len + 1)
        return ids_BW


class Samples(Protocol):
    """Samples by id."""

    def __len__(self) -> int: ...

    def read(self, sample_ids_B: Ids) -> Ids: ...


def samples_of(tokens: TokenSequence, seq_len: int, *, packing: bool = False) -> Samples:
    """Windows of a plain text, or rows of chats. `packing`: several chats in a row. Raises DataError."""
    if isinstance(tokens, Tokens) and tokens.manifest.is_chat:
        return ChatRows(tokens, seq_len, packing=packing)
    if packing:
        raise DataError("training.packing is for chats, and the data is plain text: leave it out")
    return Windows(tokens, seq_len)


class JoinedSamples:
    """The samples of several sources, one source after the other."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        self._sources = sources
        self._starts = np.cumsum([0, *map(len, sources)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, sample_ids_B: Ids) -> Ids:
        indices = np.searchsorted(self._starts, sample_ids_B, side="right") - 1
        rows = [
            self._sources[index].read(np.array([sample]) - self._starts[index])
            for index, sample in zip(indices.tolist(), sample_ids_B.tolist(), strict=True)
        ]
        return np.concatenate(rows)


class Batches:
    """Endless shuffled training batches of one source, or of several mixed by `weights`, which are whole numbers."""

    def __init__(
        self,
        *sources: TokenSequence,
        seq_len: int,
        batch_size: int,
        seed: int,
        packing: bool = False,
        weights: Sequence[int] = (1,),
    ) -> None:
        _check_batch_size(batch_size)
        if len(sources) != len(weights):
            raise ValueError(f"there are {len(sources)} sources and {len(weights)} weights")
        samples = [samples_of(tokens, seq_len, packing=packing) for tokens in sources]
        self._sizes = [len(of_source) for of_source in samples]
        self._mixture = Mixture(weights)
        self.samples = samples[0] if len(samples) == 1 else JoinedSamples(samples)
        self.batch_size, self.seed = batch_size, seed

    def sample_ids(self, samples_seen: int, count: int) -> Ids:
        """Ids of the `count` samples after the first `samples_seen` of the run, where those of a source begin after all
        of the sources before it. May span several epochs."""
        sources, ranks = self._mixture.at(samples_seen + np.arange(count, dtype=np.int64))
        ids = np.empty(count, np.int64)
        for source in np.unique(sources).tolist():
            own = sources == source
            ids[own] = sum(self._sizes[:source]) + self._ids_of_source(source, ranks[own])
        return ids

    def _ids_of_source(self, source: int, ranks: Ids) -> Ids:
        """Ids within a source; `ranks`: numbers of its samples before each of these in the run."""
        size = self._sizes[source]
        epochs, positions = np.divmod(ranks, size)
        ids = np.empty(len(ranks), np.int64)
        for epoch in np.unique(epochs).tolist():
            # The order of the first source is that of a run on it alone.
            key = derive_seed(self.seed, *(("source", source) if source else ()), "epoch", epoch)
            ids[epochs == epoch] = Permutation(size, key)(positions[epochs == epoch])
        return ids

    def batch_at(self, cursor: Cursor) -> Batch:
        sample_ids_B = self.sample_ids(cursor.samples_seen, self.batch_size)
        next_cursor = Cursor(samples_seen=cursor.samples_seen + self.batch_size)
        return Batch(self.samples.read(sample_ids_B), sample_ids_B, next_cursor)


class EvenlySpacedBatches(Sequence[Ids]):
    """Validation batches evenly spaced over the text, all full: at most `count` of each source, one source after the
    other.

    Evenly spaced because the text may consist of many documents, of which the first batches would cover only one.
    """

    def __init__(
        self, *sources: TokenSequence, seq_len: int, batch_size: int, count: int, packing: bool = False
    ) -> None:
        _check_batch_size(batch_size)
        self.batch_size = batch_size
        samples = [samples_of(tokens, seq_len, packing=packing) for tokens in sources]
        available = [len(of_source) // batch_size for of_source in samples]
        self.counts = [min(count, full) for full in available]
        """Batches of each source."""
        self._places = [
            (of_source, index * full // taken * batch_size)
            for of_source, full, taken in zip(samples, available, self.counts, strict=True)
            for index in range(taken)
        ]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Ids: ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[Ids]": ...
    def __getitem__(self, index: int | slice) -> "Ids | Sequence[Ids]":
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} does not lie in 0 ... {len(self) - 1}")
        samples, start = self._places[index]
        return samples.read(np.arange(start, start + self.batch_size))


def sequential_batches(tokens: TokenSequence, *, seq_len: int, batch_size: int) -> Iterator[tuple[Ids, Ids]]:
    """Validation batches (ids_BW, sample_ids_B) of the whole text: every sample once, in order. The last batch may be
    short."""
    _check_batch_size(batch_size)
    samples = samples_of(tokens, seq_len)
    for start in range(0, len(samples), batch_size):
        sample_ids_B = np.arange(start, min(start + batch_size, len(samples)), dtype=np.int64)
        yield samples.read(sample_ids_B), sample_ids_B


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} must be at least 1")
