"""The data as every process of a run sees it: the ids where the first segment is, a few facts everywhere."""

from collections.abc import Iterable
from itertools import repeat

import msgspec

from thinpipe.data import Cursor
from thinpipe.train.config import RunConfig
from thinpipe.train.engine import Ids
from thinpipe.train.tokens import DataFacts, LocalTokens, TokenSource
from thinpipe.transport.star import Exchange


class Feed:
    """Process 0 reads; it always has the first segment."""

    def __init__(self, config: RunConfig, exchange: Exchange, source: TokenSource | None = None) -> None:
        self.config = config
        self.source = None if exchange.rank else source or LocalTokens(config)
        told = exchange.spread(b"" if self.source is None else msgspec.json.encode(self.source.facts))
        self.facts = msgspec.json.decode(told, type=DataFacts)

    def batch(self, cursor: Cursor) -> Ids | None:
        return None if self.source is None else self.source.batch(cursor)

    def following(self, cursor: Cursor) -> Cursor:
        return Cursor(samples_seen=cursor.samples_seen + self.config.training.global_batch_size)

    def validation_batches(self) -> Iterable[Ids | None]:
        return repeat(None, self.facts.validation_batches) if self.source is None else self.source.validation

    def keep_tokenizer(self) -> None:
        if self.source is not None:
            self.source.keep_tokenizer(self.config.job.dump_folder)
