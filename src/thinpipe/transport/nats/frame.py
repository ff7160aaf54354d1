"""Wire format of frames: a fixed header and a piece of a message. Any other input raises ProtocolError.

Peers are untrusted: lengths, labels and order are compared with what the receiver expects. The checksum detects
accidental corruption only; authentication and authorization are up to TLS, keys and the server's permissions.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Self

from thinpipe.core.foreign import ProtocolError
from thinpipe.transport.labels import Label

_MAGIC, _VERSION = b"tp", 1
_FIELDS = struct.Struct("!2sBB8sIIIIIQI8sIII")
"""magic, version, kind, run, generation, incarnation, step, micro-batch, tag, sequence, basis version, basis hash,
length of the message, offset of the piece, checksum."""
HEADER_NBYTES = _FIELDS.size
PIECE, CREDIT = 0, 1
"""Frame kinds."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Run, generation and sender incarnation of a frame.

    A frame of another run is a ProtocolError; frames of another generation or incarnation are dropped.
    """

    run: bytes
    """Id of the run, 8 bytes."""
    generation: int = 0
    incarnation: int = 0

    def __post_init__(self) -> None:
        if len(self.run) != 8:
            raise ValueError(f"a run is named by 8 bytes, not {len(self.run)}")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Frame header.

    In a piece, `sequence` counts the pieces of the stream, `length` is the size of the whole message and `offset` the
    position of this piece in it, in bytes. In a credit, `sequence` is the total number of bytes that may be sent on
    this tag, counted from the start of the stream.
    """

    kind: int
    origin: Origin
    label: Label
    tag: int
    sequence: int
    length: int = 0
    offset: int = 0

    def pack(self, payload: bytes | memoryview = b"") -> bytes:
        """The frame: header with checksum, then payload."""
        fields = (
            *(_MAGIC, _VERSION, self.kind, self.origin.run, self.origin.generation, self.origin.incarnation),
            *(self.label.step, self.label.microbatch, self.tag, self.sequence),
            *(self.label.basis_version, self.label.basis_hash, self.length, self.offset),
        )
        checksum = zlib.crc32(payload, zlib.crc32(_FIELDS.pack(*fields, 0)))
        return b"".join((_FIELDS.pack(*fields, checksum), payload))

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Self, memoryview]:
        """Header and payload of a frame. Raises ProtocolError if the frame is malformed."""
        if len(data) < HEADER_NBYTES:
            raise ProtocolError(f"a frame of {len(data)} bytes, which is too short for a header")
        (magic, version, kind, run, generation, incarnation, step, microbatch, tag, sequence, basis_version, basis_hash,
         length, offset, checksum) = _FIELDS.unpack_from(data)  # fmt: skip
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError("a frame that is not thinpipe's, or of another version of it: update the older side")
        payload = memoryview(data)[HEADER_NBYTES:]
        bare = data[: HEADER_NBYTES - 4] + bytes(4)
        if zlib.crc32(payload, zlib.crc32(bare)) != checksum:
            raise ProtocolError("a frame whose bytes changed on the way: its checksum is wrong")
        header = cls(
            kind=kind,
            origin=Origin(run=run, generation=generation, incarnation=incarnation),
            label=Label(step=step, microbatch=microbatch, basis_version=basis_version, basis_hash=basis_hash),
            tag=tag,
            sequence=sequence,
            length=length,
            offset=offset,
        )
        header._refuse_nonsense(len(payload))
        return header, payload

    def _refuse_nonsense(self, nbytes: int) -> None:
        if self.kind not in (PIECE, CREDIT):
            raise ProtocolError(f"a frame of unknown kind {self.kind}")
        if self.kind == CREDIT and nbytes:
            raise ProtocolError(f"a credit with {nbytes} bytes behind it")
        if self.offset + nbytes > self.length:
            raise ProtocolError(f"a piece of {nbytes} bytes at {self.offset} of a message of {self.length}")
        if nbytes == 0 and self.length:
            raise ProtocolError("an empty piece of a message that is not empty")
