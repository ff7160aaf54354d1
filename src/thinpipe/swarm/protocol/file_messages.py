"""Messages of the file services, through which a peer reads files of the hub and uploads files to it.

`read_file` serves chunks of the hub's files; `write_file` writes files that the hub expects. A reply with a `reason` is
a refusal. All fields are validated while a message is decoded.
"""

from typing import Annotated

import msgspec

from thinpipe.core.bounds import FilePath, LongText, Nbytes, Sha256

READ_SERVICE, WRITE_SERVICE = "read_file", "write_file"
MAX_CHUNK_NBYTES = 1 << 20
"""Maximum size of one chunk, in bytes."""
MAX_IN_FLIGHT = 32
"""Maximum number of unanswered requests of one peer to one service; further requests are refused."""

ChunkSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_NBYTES)]
ChunkData = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_NBYTES)]


class StatFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stat"):
    """Asks for the size and sha256 of a file. Answered with `ReadReply`."""

    name: FilePath


class ReadChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="read"):
    """Asks for `nbytes` bytes of a file from `offset` on. Answered with `ReadReply`."""

    name: FilePath
    offset: Nbytes
    nbytes: ChunkSize


class ReadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to `StatFile` and `ReadChunk`."""

    nbytes: Nbytes = 0
    """Current size of the whole file, in bytes."""
    sha256: Sha256 = ""
    """sha256 of the whole file; only in the reply to `StatFile`."""
    data: ChunkData = b""
    """Content of the chunk; only in the reply to `ReadChunk`."""
    reason: LongText = ""
    """Reason of a refusal; empty: accepted."""


class BeginWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="begin"):
    """Starts or resumes an upload of a file of `nbytes` bytes; the reply says how much of it is stored."""

    name: FilePath
    nbytes: Nbytes


class WriteChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chunk"):
    """A chunk of an upload. The hub writes the chunk only if `offset` is exactly the number of bytes stored."""

    name: FilePath
    offset: Nbytes
    data: ChunkData


class WriteReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to `BeginWrite` and `WriteChunk`."""

    stored_nbytes: Nbytes = 0
    """Number of bytes stored, from the start of the file."""
    complete: bool = False
    """True: the file is complete, its hash is right, and it is durable on the hub's disk."""
    reason: LongText = ""
    """Reason of a refusal; empty: accepted."""


ReadRequest = StatFile | ReadChunk
WriteRequest = BeginWrite | WriteChunk
