"""The text of a tokenization in blocks: what a process encodes at a time, and what an interruption leaves done or not.

Blocks follow from the text alone, whatever the number of processes, and so do the tokens.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from thinpipe.data.chat.encoding import ChatCounts, ChatEncoder, EncodedChat
from thinpipe.data.chat.formats import UnusableChatError
from thinpipe.data.chunking import cut_into_pieces, group_by_size
from thinpipe.data.readers import Document
from thinpipe.data.shards import ShardWriter
from thinpipe.data.sources import Split, SplitText
from thinpipe.data.tokenizer import Tokenizer

BLOCK_CHARS = 2**19
"""Characters of a block: a fraction of a second of encoding."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a document, small enough to encode at once; of chats a whole record, as JSON."""

    side: Split
    text: str
    read_nbytes: int
    """Bytes of the source read for this document: 0 but for its last piece."""
    ends_document: bool
    where: str = ""


Block = list[Piece]


def blocks_of(text: SplitText, *, chats: bool) -> Iterator[Block]:
    pieces = (piece for side, document in text.documents() for piece in _pieces(side, document, chats=chats))
    return group_by_size(pieces, lambda piece: len(piece.text), BLOCK_CHARS)


def _pieces(side: Split, document: Document, *, chats: bool) -> Iterator[Piece]:
    parts = [document.text] if chats else list(cut_into_pieces(document.text))
    for part in parts[:-1]:
        yield Piece(side, part, 0, ends_document=False)
    yield Piece(side, parts[-1], document.read_nbytes, ends_document=True, where=document.where)


def read_nbytes(block: Block) -> int:
    return sum(piece.read_nbytes for piece in block)


class TextHash:
    """Hash of all blocks so far, by which changed text is noticed."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, block: Block) -> None:
        for piece in block:
            self._hash.update(f"{piece.side}\n{len(piece.text)}\n{piece.text}".encode())

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class EncodedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece as token ids. Of chats also what its flags and `ChatCounts` are made of."""

    ids: bytes
    """uint32, in this machine's byte order."""
    text_nbytes: int
    trained: bytes = b""
    """A bool for each id."""
    is_cut: bool = False
    holds_special_tokens: bool = False
    dropped: str = ""
    """Why the chat is left out."""


class BlockEncoder(Protocol):
    def encode(self, block: Block) -> list[EncodedPiece]:
        """Raises DataError."""
        ...


class TextBlockEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, block: Block) -> list[EncodedPiece]:
        encoded = self._tokenizer.encode_batch([piece.text for piece in block])
        return [
            EncodedPiece(ids.tobytes(), len(piece.text.encode())) for ids, piece in zip(encoded, block, strict=True)
        ]


class ChatBlockEncoder:
    def __init__(self, chats: ChatEncoder) -> None:
        self._chats = chats

    def encode(self, block: Block) -> list[EncodedPiece]:
        return [self._encode(piece) for piece in block]

    def _encode(self, piece: Piece) -> EncodedPiece:
        try:
            chat = self._chats.encode(Document(piece.text, piece.read_nbytes, piece.where))
        except UnusableChatError as error:
            return EncodedPiece(b"", 0, dropped=str(error))
        nbytes = len(self._chats.template.decode(chat.ids.tolist()).encode())
        return EncodedPiece(chat.ids.tobytes(), nbytes, chat.trained.tobytes(), chat.is_cut, chat.holds_special_tokens)


def write_block(
    block: Block,
    encoded: Sequence[EncodedPiece],
    writers: Mapping[Split, ShardWriter],
    counts: Mapping[Split, ChatCounts],
) -> None:
    """Appends a block to the shards of its sides. `counts`: of chats; empty for plain text."""
    for piece, made in zip(block, encoded, strict=True):
        ids = np.frombuffer(made.ids, np.uint32)
        if not counts:
            writers[piece.side].add(ids, text_nbytes=made.text_nbytes, ends_document=piece.ends_document)
        elif made.dropped:
            counts[piece.side].drop(made.dropped)
        else:
            trained = np.frombuffer(made.trained, np.bool_)
            counts[piece.side].add(EncodedChat(ids, trained, made.is_cut, made.holds_special_tokens))
            writers[piece.side].add_chat(ids, trained, text_nbytes=made.text_nbytes)
