"""Chats of a folder of tokens as a question and its answer: what comes before the last turn that is trained on, and
that turn."""

from typing import NamedTuple

import numpy as np

from thinpipe.core.errors import DataError
from thinpipe.core.token_flags import ID_MASK, TRAINED
from thinpipe.data.manifest import ChatFacts
from thinpipe.data.shards import Tokens


class HeldOutChat(NamedTuple):
    prompt: list[int]
    """Token ids up to the answer: earlier turns, and what the template writes before the assistant speaks."""
    answer: list[int]
    """Token ids of the answer in the data, with the token that ends it."""


def held_out_chats(tokens: Tokens, count: int) -> list[HeldOutChat]:
    """`count` chats, evenly spaced over the folder, or all if there are fewer. Raises DataError if it has no chats."""
    if not isinstance(tokens.manifest.chat, ChatFacts):
        raise DataError(f"{tokens.folder} has plain text and no chats: make it with `thinpipe tokenize --chat`")
    if tokens.manifest.chat.train_on == "all":
        raise DataError(f"{tokens.folder} was made with --train-on all, which does not say where an answer begins")
    starts = tokens.chat_starts()
    chosen = np.unique(np.linspace(0, len(starts) - 2, num=min(count, len(starts) - 1)).astype(np.int64))
    return [_last_turn(tokens, int(starts[index]), int(starts[index + 1])) for index in chosen]


def _last_turn(tokens: Tokens, start: int, stop: int) -> HeldOutChat:
    flagged = tokens.read(start, stop)
    ids, trained = (flagged & ID_MASK).tolist(), (flagged & TRAINED) != 0
    end = int(np.flatnonzero(trained)[-1]) + 1
    others = np.flatnonzero(~trained[:end])
    begin = int(others[-1]) + 1
    return HeldOutChat(ids[:begin], ids[begin:end])
