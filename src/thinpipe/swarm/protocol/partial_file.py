"""A file received in chunks: they are appended to `<target>.partial`, which survives a crash, so that a transfer can
resume. With several senders each has a file of its own, `<target>.<sender>.partial`: what one sends stands in nobody's
way.

Size and sha256 are known in advance. The target appears only when both match, and is durable then.
"""

import glob
from pathlib import Path

from thinpipe.core.files import file_sha256, rename_durably


class PartialFile:
    """Stateless view of a target and its partial file; keeps no file open. One writer at a time. `sender`: a name that
    can be part of a file's."""

    def __init__(self, target: Path, *, nbytes: int, sha256: str, sender: str = "") -> None:
        self.target, self.nbytes, self.sha256 = target, nbytes, sha256
        self.partial = target.with_name(f"{target.name}.{sender}.partial" if sender else f"{target.name}.partial")

    def is_complete(self) -> bool:
        """True if the target exists with the right size and hash. Reads the whole file."""
        target = self.target
        return target.is_file() and target.stat().st_size == self.nbytes and file_sha256(target) == self.sha256

    def stored_nbytes(self) -> int:
        """Number of bytes received so far. A partial file longer than the target belongs to another file and is
        deleted."""
        try:
            nbytes = self.partial.stat().st_size
        except FileNotFoundError:
            return 0
        if nbytes > self.nbytes:
            self.discard()
            return 0
        return nbytes

    def append(self, data: bytes) -> int:
        """Appends a chunk and returns the number of bytes stored. On a full disk a part of the chunk may have been
        written, which is harmless."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self.partial.open("ab", buffering=0) as file:
            if file.tell() + len(data) > self.nbytes:
                raise ValueError(f"{self.target} must not grow beyond {self.nbytes} bytes")
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            return file.tell()

    def finish(self) -> bool:
        """Checks size and hash. Renames the partial file to the target, deletes those of other senders and returns
        True, or deletes it and returns False."""
        self.append(b"")  # creates an empty file, which has no chunks
        if self.stored_nbytes() != self.nbytes or file_sha256(self.partial) != self.sha256:
            self.discard()
            return False
        rename_durably(self.partial, self.target)
        for other in self.target.parent.glob(f"{glob.escape(self.target.name)}.*.partial"):
            other.unlink(missing_ok=True)
        return True

    def discard(self) -> None:
        self.partial.unlink(missing_ok=True)
