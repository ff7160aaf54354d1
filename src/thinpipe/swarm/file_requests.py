"""What a peer asks the hub about files, and what it answers. Everything here is checked while it is decoded.

Two services: `file` reads files of the hub in pieces, `keep` writes files that the hub expects. An answer with a
`reason` is a refusal.
"""

from typing import Annotated, TypeVar

import msgspec

from thinpipe.swarm.reading import read

FILE, KEEP = "file", "keep"
MOST_NBYTES = 1 << 20
"""Of one piece."""
MOST_AT_ONCE = 32
"""Requests that one peer may have under way at one service; more are refused."""
_MOST_REQUEST_NBYTES = MOST_NBYTES + 8192

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=1000)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
PieceSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_NBYTES)]
Piece = Annotated[bytes, msgspec.Meta(max_length=MOST_NBYTES)]


class Stat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stat"):
    """How large is this file, and what is its sha256?"""

    name: Name


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="read"):
    name: Name
    offset: Size
    nbytes: PieceSize


class FileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    nbytes: Size = 0
    """Of the whole file, as it is now."""
    sha256: Sha256 = ""
    """To `Stat`."""
    data: Piece = b""
    """To `Read`."""
    reason: Reason = ""


class Begin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="begin"):
    """We have this file, of so many bytes: how much of it is there?"""

    name: Name
    nbytes: Size


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chunk"):
    """Written only if the hub has exactly what is before it."""

    name: Name
    offset: Size
    data: Piece


class KeepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    have: Size = 0
    """So many bytes are there, from the beginning."""
    whole: bool = False
    """The file is complete, its hash is right, and it is on the disk."""
    reason: Reason = ""


Message = TypeVar("Message")
FILE_REQUESTS: msgspec.msgpack.Decoder[Stat | Read] = msgspec.msgpack.Decoder(Stat | Read)
KEEP_REQUESTS: msgspec.msgpack.Decoder[Begin | Chunk] = msgspec.msgpack.Decoder(Begin | Chunk)
FILE_ANSWERS = msgspec.msgpack.Decoder(FileAnswer)
KEEP_ANSWERS = msgspec.msgpack.Decoder(KeepAnswer)


def decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message | None:
    """None for whatever is not such a message."""
    return None if len(data) > _MOST_REQUEST_NBYTES else read(decoder, data)


def is_plain(name: str) -> bool:
    """Parts with slashes between them that lead nowhere but down, on every system."""
    return (
        name.isprintable()
        and not set(name) & set('\\:*?"<>|')
        and all(part.strip(" .") and part == part.strip(" ") for part in name.split("/"))
    )
