"""The data as every process of a run sees it: the ids where the first segment is, a few facts everywhere."""

from collections.abc import Iterator
from itertools import repeat

import msgspec

from thinpipe.data import Batches, Cursor, Tokenizer, Tokens, has_tokens, spread_batches
from thinpipe.train.config import RunConfig
from thinpipe.train.engine import Ids
from thinpipe.transport.star import Exchange


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the first process tells the others, who need not have the data."""

    vocab_size: int
    sha256: str
    validation_batches: int
    bits_per_byte_per_nat: float | None


class Feed:
    """Process 0 reads; it always has the first segment."""

    def __init__(self, config: RunConfig, exchange: Exchange) -> None:
        self.config = config
        self.tokens: Tokens | None = None
        self.validation: Tokens | None = None
        if exchange.rank == 0:
            folder = config.data.path
            self.tokens = Tokens(folder / "train")
            self.validation = Tokens(folder / "validation") if has_tokens(folder / "validation") else None
        facts = self._facts()
        told = exchange.spread(b"" if facts is None else msgspec.json.encode(facts))
        self.facts = msgspec.json.decode(told, type=DataFacts)
        training = config.training
        self.batches: Batches | None = None
        if self.tokens is not None:
            self.batches = Batches(
                self.tokens, seq_len=training.seq_len, batch_size=training.global_batch_size, seed=config.debug.seed
            )

    def _facts(self) -> DataFacts | None:
        if self.tokens is None:
            return None
        per_nat, batches = None, 0
        if self.validation is not None:
            per_nat = self.validation.manifest.bits_per_byte(1.0)
            training = self.config.training
            samples = (len(self.validation) - 1) // training.seq_len
            batches = samples // training.global_batch_size
            batches = min(batches, self.config.validation.steps or batches)
        return DataFacts(
            vocab_size=self.tokens.manifest.vocabulary.size,
            sha256=self.tokens.manifest.content_sha256,
            validation_batches=batches,
            bits_per_byte_per_nat=per_nat,
        )

    def batch(self, cursor: Cursor) -> Ids | None:
        return None if self.batches is None else self.batches.batch_at(cursor).ids_BW

    def following(self, cursor: Cursor) -> Cursor:
        return Cursor(samples_seen=cursor.samples_seen + self.config.training.global_batch_size)

    def validation_batches(self) -> Iterator[Ids | None]:
        """Whole batches only: the segments of a pipeline have fixed shapes, and every placement sees the same."""
        count, training = self.facts.validation_batches, self.config.training
        if self.validation is None:
            return repeat(None, count)
        return spread_batches(
            self.validation, seq_len=training.seq_len, batch_size=training.global_batch_size, count=count
        )

    def keep_tokenizer(self) -> None:
        """The run's folder is all that is needed to use the model."""
        source = self.config.data.path / "tokenizer"
        if self.tokens is not None and source.is_dir():
            Tokenizer.load(source).save(self.config.job.dump_folder / "tokenizer")
