"""How many chats there are and how long: what `thinpipe new` chooses the length of a sequence and the steps by."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from thinpipe.data import Source, TokenizeConfig, Tokenizer
from thinpipe.data.chat.encoding import ChatEncoder
from thinpipe.data.chat.formats import UnusableChatError
from thinpipe.data.chat.template import ChatTemplate

_MOST_CHATS = 1000
"""Chats that are rendered: enough for their lengths, and done in a second or two."""


@dataclass(frozen=True)
class ChatLengths:
    """The chats of a source that can be trained on."""

    chats: int
    longest: int
    """Tokens of the longest."""
    is_all: bool
    """Whether these are all chats of the source, not its first `_MOST_CHATS`."""


def chat_lengths(source: Source, tokenizer: Path) -> ChatLengths:
    """Renders the first chats with the template in the folder `tokenizer`. Raises DataError if there is no template, or
    a record is no chat."""
    config = TokenizeConfig(sources=("chats",), output=Path(), tokenizer=tokenizer, chat=True)
    chats = ChatEncoder(config, ChatTemplate(tokenizer), Tokenizer.load(tokenizer).vocabulary.size)
    lengths, documents = [], source.documents()
    for document in islice(documents, _MOST_CHATS):
        try:
            lengths.append(len(chats.encode(document).ids))
        except UnusableChatError:
            continue  # `thinpipe tokenize` counts these, with the reason
    return ChatLengths(len(lengths), max(lengths, default=0), is_all=next(documents, None) is None)
