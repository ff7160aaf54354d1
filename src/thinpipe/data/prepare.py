"""Tokenizes text or chats into a folder to train on: tokenizer/, train/ and, if requested, validation/ (`thinpipe
tokenize`).

The manifest of train/ is written last and removed first: its presence means that the folder is complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from thinpipe.config.data import TokenizeConfig
from thinpipe.core.errors import DataError
from thinpipe.data.chat.encoding import ChatCounts, ChatEncoder, ShowChat, show_nothing
from thinpipe.data.chat.formats import UnusableChatError
from thinpipe.data.chat.template import ChatTemplate
from thinpipe.data.chunking import group_by_size
from thinpipe.data.manifest import Manifest
from thinpipe.data.progress import Advance, Progress, no_progress
from thinpipe.data.shards import ChatRendering, ShardWriter, refuse_finished_tokens, remove_tokens
from thinpipe.data.sources import Split, SplitText, open_sources
from thinpipe.data.tokenizer import ENCODE_CHARS, Tokenizer

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_TOKENIZER_TEXT_NBYTES = 1_000_000_000


@dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: Manifest
    validation: Manifest | None
    chats: Mapping[Split, ChatCounts] = field(default_factory=dict)
    """What became of the chats of each side; empty for plain text."""


def prepare(config: TokenizeConfig, progress: Progress = no_progress, show_chat: ShowChat = show_nothing) -> Prepared:
    """Trains or loads the tokenizer, tokenizes all text and writes the output folder. Raises DataError.

    `show_chat` is called with the first chat before anything is written. If it raises or is killed, no incomplete
    tokens are left that could be opened.
    """
    folders: dict[Split, Path] = {"train": config.output / "train", "validation": config.output / "validation"}
    if not config.overwrite:
        refuse_finished_tokens(folders["train"])
    text = _open_text(config)
    tokenizer = _make_tokenizer(config, text, progress)
    chats = _open_chats(config, text, tokenizer, show_chat) if config.chat else None
    for folder in folders.values():
        if folder.exists():
            remove_tokens(folder)
    tokenizer.save(config.output / "tokenizer")
    with ExitStack() as stack:
        writers: dict[Split, ShardWriter] = {}
        for side, source in text.descriptions.items():
            writer = ShardWriter(
                folders[side],
                tokenizer.vocabulary,
                source=source,
                max_shard_tokens=config.max_shard_tokens,
                chat=None if chats is None else ChatRendering(chats.template.sha256, chats.train_on),
            )
            writers[side] = stack.enter_context(writer)
        with progress("tokenizing", text.total_nbytes) as advance:
            counts = {} if chats is None else _write_chats(text, chats, writers, advance)
            if chats is None:
                _pack(text, tokenizer, writers, advance)
        if config.validation_fraction is not None:
            _check_fraction(config.validation_fraction, writers)
        validation = writers["validation"].finish() if "validation" in writers else None
        return Prepared(tokenizer, writers["train"].finish(), validation, counts)


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


def _pack(text: SplitText, tokenizer: Tokenizer, writers: Mapping[Split, ShardWriter], advance: Advance) -> None:
    for group in group_by_size(text.documents(), lambda labelled: len(labelled[1].text), ENCODE_CHARS):
        encoded = tokenizer.encode_batch([document.text for _, document in group])
        for (side, document), ids in zip(group, encoded, strict=True):
            writers[side].add(ids, text_nbytes=len(document.text.encode()))
        advance(sum(document.read_nbytes for _, document in group))


def _open_chats(config: TokenizeConfig, text: SplitText, tokenizer: Tokenizer, show: ShowChat) -> ChatEncoder:
    """Shows the first chat that can be trained on. Raises DataError, with all reasons, if there is none."""
    assert config.tokenizer is not None
    chats = ChatEncoder(config, ChatTemplate(config.tokenizer), tokenizer.vocabulary.size)
    counts = ChatCounts()
    for document in text.train_documents():
        try:
            show(chats.pieces(chats.encode(document)))
        except UnusableChatError as error:
            counts.dropped[str(error)] += 1
        else:
            return chats
    _refuse_no_chats(text.descriptions["train"], counts)
    return chats


def _write_chats(
    text: SplitText, chats: ChatEncoder, writers: Mapping[Split, ShardWriter], advance: Advance
) -> dict[Split, ChatCounts]:
    counts = {side: ChatCounts() for side in writers}
    for side, document in text.documents():
        try:
            chat = chats.encode(document)
        except UnusableChatError as error:
            counts[side].dropped[str(error)] += 1
        else:
            counts[side].add(chat)
            nbytes = len(chats.template.decode(chat.ids.tolist()).encode())
            writers[side].add_chat(chat.ids, chat.trained, text_nbytes=nbytes)
        advance(document.read_nbytes)
    for side, found in counts.items():
        if found.dropped:
            _refuse_no_chats(text.descriptions[side], found)
    return counts


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
