"""Messages of the file services, through which a peer reads files of the hub and uploads files to it.

`read_file` serves chunks of the hub's files; `write_file` writes files that the hub expects. A reply with a `reason` is
a refusal. All fields are validated while a message is decoded.
"""

from typing import Annotated, TypeVar

import msgspec

from thinpipe.swarm.protocol.decoding import decode_or_none

READ_SERVICE, WRITE_SERVICE = "read_file", "write_file"
MAX_CHUNK_NBYTES = 1 << 20
"""Maximum size of one chunk, in bytes."""
MAX_IN_FLIGHT = 32
"""Maximum number of unanswered requests of one peer to one service; further requests are refused."""
_MAX_MESSAGE_NBYTES = MAX_CHUNK_NBYTES + 8192

FileName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=1000)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
ChunkSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_NBYTES)]
ChunkData = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_NBYTES)]


class StatFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stat"):
    """Asks for the size and sha256 of a file. Answered with `ReadReply`."""

    name: FileName


class ReadChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="read"):
    """Asks for `nbytes` bytes of a file from `offset` on. Answered with `ReadReply`."""

    name: FileName
    offset: Size
    nbytes: ChunkSize


class ReadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to `StatFile` and `ReadChunk`."""

    nbytes: Size = 0
    """Current size of the whole file, in bytes."""
    sha256: Sha256 = ""
    """sha256 of the whole file; only in the reply to `StatFile`."""
    data: ChunkData = b""
    """Content of the chunk; only in the reply to `ReadChunk`."""
    reason: Reason = ""
    """Reason of a refusal; empty: accepted."""


class BeginWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="begin"):
    """Starts or resumes an upload of a file of `nbytes` bytes; the reply says how much of it is stored."""

    name: FileName
    nbytes: Size


class WriteChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chunk"):
    """A chunk of an upload. The hub writes the chunk only if `offset` is exactly the number of bytes stored."""

    name: FileName
    offset: Size
    data: ChunkData


class WriteReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to `BeginWrite` and `WriteChunk`."""

    stored_nbytes: Size = 0
    """Number of bytes stored, from the start of the file."""
    complete: bool = False
    """True: the file is complete, its hash is right, and it is durable on the hub's disk."""
    reason: Reason = ""
    """Reason of a refusal; empty: accepted."""


Message = TypeVar("Message")
READ_REQUEST_DECODER: msgspec.msgpack.Decoder[StatFile | ReadChunk] = msgspec.msgpack.Decoder(StatFile | ReadChunk)
WRITE_REQUEST_DECODER: msgspec.msgpack.Decoder[BeginWrite | WriteChunk] = msgspec.msgpack.Decoder(
    BeginWrite | WriteChunk
)
READ_REPLY_DECODER = msgspec.msgpack.Decoder(ReadReply)
WRITE_REPLY_DECODER = msgspec.msgpack.Decoder(WriteReply)


def decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message | None:
    """The decoded message; None if the data is too long or not a valid message."""
    return None if len(data) > _MAX_MESSAGE_NBYTES else decode_or_none(decoder, data)


def is_safe_path(name: str) -> bool:
    """True for a relative path that stays inside its folder on every operating system; rejects path traversal."""
    return (
        name.isprintable()
        and not set(name) & set('\\:*?"<>|')
        and all(part.strip(" .") and part == part.strip(" ") for part in name.split("/"))
    )
