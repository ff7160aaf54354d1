"""Tokenizes text or chats into a folder to train on: tokenizer/, train/ and, if requested, validation/ (`thinpipe
tokenize`).

The manifest of train/ is written last and removed first: its presence means that the folder is complete. Until then a
journal says how far the text is tokenized, and the same call goes on from there.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from thinpipe.config.data import TokenizeConfig
from thinpipe.core.errors import DataError
from thinpipe.core.files import remove_partial_files
from thinpipe.core.folder_lock import run_lock
from thinpipe.data.blocks import (
    Block,
    BlockEncoder,
    ChatBlockEncoder,
    TextBlockEncoder,
    TextHash,
    blocks_of,
    read_nbytes,
    write_block,
)
from thinpipe.data.chat.encoding import ChatCounts, ChatEncoder, ShowChat, show_nothing
from thinpipe.data.chat.formats import UnusableChatError
from thinpipe.data.chat.template import ChatTemplate
from thinpipe.data.encoding_processes import EncodingProcesses, usable_cores
from thinpipe.data.journal import Journal, JournalEntry, made_of
from thinpipe.data.manifest import Manifest
from thinpipe.data.progress import Advance, Progress, no_progress
from thinpipe.data.shards import ChatRendering, ShardWriter, has_tokens, refuse_finished_tokens, remove_tokens
from thinpipe.data.sources import Split, SplitText, open_sources
from thinpipe.data.tokenizer import Tokenizer

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_TOKENIZER_TEXT_NBYTES = 1_000_000_000
JOURNAL_SECONDS = 2.0
"""Time between two records of what is on the disk: what an interruption may lose."""


@dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: Manifest
    validation: Manifest | None
    chats: Mapping[Split, ChatCounts] = field(default_factory=dict)
    """What became of the chats of each side; empty for plain text."""
    resumed_nbytes: int = 0
    """Bytes of text that had been tokenized by a call that was interrupted."""


def prepare(config: TokenizeConfig, progress: Progress = no_progress, show_chat: ShowChat = show_nothing) -> Prepared:
    """Trains or loads the tokenizer, tokenizes all text and writes the output folder. Raises DataError.

    `show_chat` is called with the first chat before anything is written. If it raises or is killed, no incomplete
    tokens are left that could be opened, and the same call goes on where it was.
    """
    if not config.overwrite:
        refuse_finished_tokens(config.output / "train")
    text = _open_text(config)
    with run_lock(config.output, "another `thinpipe tokenize`: wait until it ends, or choose another folder"):
        return _Tokenization(config, text, progress, show_chat).run()


class _Tokenization:
    """Tokenizes `text` into the output folder, which is locked, from the beginning or from what the journal has."""

    def __init__(self, config: TokenizeConfig, text: SplitText, progress: Progress, show_chat: ShowChat) -> None:
        self._config, self._text, self._progress = config, text, progress
        self._journal, self._made_of = Journal(config.output), made_of(config, text)
        is_finished = has_tokens(config.output / "train")
        self._begun = None if is_finished else self._journal.find(self._made_of, overwrite=config.overwrite)
        self._saved_tokenizer = config.output / "tokenizer"
        if self._begun is not None and config.tokenizer is None:
            self._tokenizer = Tokenizer.load(self._saved_tokenizer)
        else:
            self._tokenizer = _make_tokenizer(config, text, progress)
        self._encoder: BlockEncoder = TextBlockEncoder(self._tokenizer)
        self._rendering: ChatRendering | None = None
        if config.chat:
            chats = _open_chats(config, text, self._tokenizer, show_chat)
            self._encoder = ChatBlockEncoder(chats)
            self._rendering = ChatRendering(chats.template.sha256, chats.train_on)
        self._counts = {side: ChatCounts() for side in text.descriptions} if config.chat else {}
        if self._begun is not None:
            self._counts = self._begun.chats

    def run(self) -> Prepared:
        if self._begun is None:
            self._clear()
        with ExitStack() as stack:
            writers = {side: stack.enter_context(self._open_writer(side)) for side in self._text.descriptions}
            with self._progress("tokenizing", self._text.total_nbytes) as advance:
                self._write_blocks(writers, advance)
            for side, found in self._counts.items():
                if found.dropped:
                    _refuse_no_chats(self._text.descriptions[side], found)
            if self._config.validation_fraction is not None:
                _check_fraction(self._config.validation_fraction, writers)
            validation = writers["validation"].finish() if "validation" in writers else None
            train = writers["train"].finish()
        self._journal.remove()
        resumed_nbytes = 0 if self._begun is None else self._begun.text_nbytes
        return Prepared(self._tokenizer, train, validation, self._counts, resumed_nbytes)

    def _clear(self) -> None:
        """Removes what the folder has, the journal first: no journal may speak of other tokens than those here."""
        self._journal.remove()
        for side in ("train", "validation"):
            if (self._config.output / side).exists():
                remove_tokens(self._config.output / side)
        remove_partial_files(self._saved_tokenizer)
        self._tokenizer.save(self._saved_tokenizer)

    def _open_writer(self, side: Split) -> ShardWriter:
        return ShardWriter(
            self._config.output / side,
            self._tokenizer.vocabulary,
            source=self._text.descriptions[side],
            max_shard_tokens=self._config.max_shard_tokens,
            chat=self._rendering,
            resume=None if self._begun is None else self._begun.sides[side],
        )

    def _write_blocks(self, writers: Mapping[Split, ShardWriter], advance: Advance) -> None:
        blocks, text_hash = blocks_of(self._text, chats=self._config.chat), TextHash()
        count = self._skip_blocks(blocks, text_hash, advance)
        self._record(count, text_hash, writers)
        recorded = time.monotonic()
        workers = self._config.workers or usable_cores()
        with EncodingProcesses(self._config, self._saved_tokenizer, workers) as processes:
            for block, encoded in processes.encode_in_order(blocks, self._encoder):
                write_block(block, encoded, writers, self._counts)
                text_hash.add(block)
                count += 1
                advance(read_nbytes(block))
                if time.monotonic() - recorded >= JOURNAL_SECONDS:
                    self._record(count, text_hash, writers)
                    recorded = time.monotonic()

    def _skip_blocks(self, blocks: Iterator[Block], text_hash: TextHash, advance: Advance) -> int:
        """Reads the blocks whose tokens are on the disk, without encoding them. Raises DataError if they are others."""
        if self._begun is None:
            return 0
        for block in islice(blocks, self._begun.blocks):
            text_hash.add(block)
            advance(read_nbytes(block))
        if text_hash.sha256 != self._begun.text_sha256:
            raise DataError(
                f"{self._config.output} holds unfinished tokens of a text that has changed since: remove that folder "
                "to begin anew"
            )
        return self._begun.blocks

    def _record(self, blocks: int, text_hash: TextHash, writers: Mapping[Split, ShardWriter]) -> None:
        sides = {side: writer.save() for side, writer in writers.items()}
        self._journal.write(
            JournalEntry(
                made_of=self._made_of,
                blocks=blocks,
                text_sha256=text_hash.sha256,
                sides=sides,
                chats=self._counts,
            )
        )


def _open_text(config: TokenizeConfig) -> SplitText:
    validation = None
    if config.validation_sources:
        split = config.validation_split or "validation"
        validation = open_sources(config.validation_sources, field=config.text_field, split=split, chats=config.chat)
    return SplitText(
        train=open_sources(config.sources, field=config.text_field, split=config.split or "train", chats=config.chat),
        validation=validation,
        fraction=config.validation_fraction,
        seed=config.validation_seed,
        max_documents=config.max_documents,
    )


def _make_tokenizer(config: TokenizeConfig, text: SplitText, progress: Progress) -> Tokenizer:
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer, config.end_of_text)
    with progress("training the tokenizer", None) as advance:
        texts = _limited(text.train_texts(), config.tokenizer_text_nbytes or DEFAULT_TOKENIZER_TEXT_NBYTES, advance)
        return Tokenizer.train(texts, vocab_size=config.vocab_size or DEFAULT_VOCAB_SIZE)


def _limited(texts: Iterator[str], limit_nbytes: int, advance: Advance) -> Iterator[str]:
    """The first texts, until their total size reaches `limit_nbytes`."""
    total_nbytes = 0
    for text in texts:
        if total_nbytes >= limit_nbytes:
            return
        nbytes = len(text.encode())
        total_nbytes += nbytes
        advance(nbytes)
        yield text


def _open_chats(config: TokenizeConfig, text: SplitText, tokenizer: Tokenizer, show: ShowChat) -> ChatEncoder:
    """Shows the first chat that can be trained on. Raises DataError, with all reasons, if there is none."""
    assert config.tokenizer is not None
    chats = ChatEncoder(config, ChatTemplate(config.tokenizer), tokenizer.vocabulary.size)
    counts = ChatCounts()
    for document in text.train_documents():
        try:
            show(chats.pieces(chats.encode(document)))
        except UnusableChatError as error:
            counts.drop(str(error))
        else:
            return chats
    _refuse_no_chats(text.descriptions["train"], counts)
    return chats


def _refuse_no_chats(source: str, counts: ChatCounts) -> None:
    if not counts.chats:
        raise DataError(f"no chat of {source} can be trained on: {counts.describe_dropped() or 'there is none'}")


def _check_fraction(fraction: float, writers: Mapping[Split, ShardWriter]) -> None:
    total = sum(writer.documents for writer in writers.values())
    for side, writer in writers.items():
        if total and not writer.documents:
            raise DataError(
                f"validation_fraction {fraction:g} leaves none of the {total:,} documents for {side}: "
                "choose another fraction or seed, or set validation_sources"
            )
