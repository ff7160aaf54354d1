"""A record of a source as a chat with flags: rendered, cut if it is too long, refused if nothing of it is trained on;
and the counts of what became of all records."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinpipe.config.data import TokenizeConfig, TrainOn
from thinpipe.core.errors import DataError
from thinpipe.data.chat.formats import UnusableChatError, chat_of
from thinpipe.data.chat.template import ChatTemplate
from thinpipe.data.chat.trained_tokens import Flags, encode_chat
from thinpipe.data.readers import Document

TOO_LONG = "longer than seq_len"
NOTHING_TRAINED = "nothing to train on"
NOTHING_LEFT = "nothing to train on before the cut at seq_len"

ShowChat = Callable[[Sequence[tuple[str, bool]]], None]
"""Shows a chat: pieces of its text, and whether each is trained on."""


def show_nothing(_pieces: Sequence[tuple[str, bool]]) -> None:
    """For library code and tests."""


class EncodedChat(NamedTuple):
    ids: npt.NDArray[np.uint32]
    trained: Flags
    is_cut: bool
    holds_special_tokens: bool


@dataclass(kw_only=True)
class ChatCounts:
    """What became of the chats of one side of the split."""

    chats: int = 0
    cut: int = 0
    with_special_tokens: int = 0
    """Chats in which somebody's words hold the text of a special token."""
    tokens: int = 0
    trained_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Chats that were left out, by reason."""

    def add(self, chat: EncodedChat) -> None:
        self.chats += 1
        self.cut += chat.is_cut
        self.with_special_tokens += chat.holds_special_tokens
        self.tokens += len(chat.ids)
        self.trained_tokens += int(chat.trained.sum())

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def describe_dropped(self) -> str:
        return "; ".join(
            f"{count:,} {reason}" for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1])
        )


class ChatEncoder:
    """Encodes records with one template and the settings of one tokenization."""

    def __init__(self, config: TokenizeConfig, template: ChatTemplate, vocab_size: int) -> None:
        self.template, self.train_on = template, train_on_of(config)
        self._limit = None if config.seq_len is None else config.seq_len + 1
        self._drops, self._vocab_size = config.too_long == "drop", vocab_size

    def encode(self, document: Document) -> EncodedChat:
        """Raises UnusableChatError with the reason, DataError for what is no chat."""
        chat = chat_of(json.loads(document.text), document.where)
        listed, trained = encode_chat(chat, self.template, self.train_on)
        ids, is_cut = np.array(listed, np.uint32), self._limit is not None and len(listed) > self._limit
        if is_cut and self._drops:
            raise UnusableChatError(TOO_LONG)
        ids, trained = ids[: self._limit], trained[: self._limit].copy()
        trained[:1] = False  # nothing comes before it, from which it could be learnt
        if not trained.any():
            raise UnusableChatError(NOTHING_LEFT if is_cut else NOTHING_TRAINED)
        if (largest := int(ids.max())) >= self._vocab_size:
            raise DataError(
                f"{document.where}: the chat template writes a token with id {largest}, but tokenizer.json has ids "
                f"below {self._vocab_size}: save the tokenizer again with transformers, which writes all tokens there"
            )
        return EncodedChat(ids, trained, is_cut, self.template.holds_special_tokens(chat.messages))

    def pieces(self, chat: EncodedChat) -> list[tuple[str, bool]]:
        """The text of a chat in runs of tokens that are, or are not, trained on."""
        runs = groupby(zip(chat.ids.tolist(), chat.trained.tolist(), strict=True), key=lambda token: token[1])
        return [(self.template.decode([token for token, _ in run]), is_trained) for is_trained, run in runs]


def train_on_of(config: TokenizeConfig) -> TrainOn:
    return config.train_on or "assistant"
