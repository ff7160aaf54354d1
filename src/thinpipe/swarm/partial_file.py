"""A file that comes in pieces: they gather in `<target>.partial`, which survives a crash and is gone on with.

Size and sha256 are known before. The target appears when both are right, and is on the disk then.
"""

from pathlib import Path

from thinpipe.core.files import file_sha256, rename_durably


class PartialFile:
    """Keeps nothing open and nothing in mind. One writer at a time."""

    def __init__(self, target: Path, *, nbytes: int, sha256: str) -> None:
        self.target, self.nbytes, self.sha256 = target, nbytes, sha256
        self.partial = target.with_name(f"{target.name}.partial")

    def is_whole(self) -> bool:
        target = self.target
        return target.is_file() and target.stat().st_size == self.nbytes and file_sha256(target) == self.sha256

    def have(self) -> int:
        """So many bytes are there. What is longer than the file should be is of another one, and is deleted."""
        try:
            nbytes = self.partial.stat().st_size
        except FileNotFoundError:
            return 0
        if nbytes > self.nbytes:
            self.discard()
            return 0
        return nbytes

    def append(self, data: bytes) -> int:
        """How many bytes are there now. On a full disk a part of the data may be, which does no harm."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self.partial.open("ab", buffering=0) as file:
            if file.tell() + len(data) > self.nbytes:
                raise ValueError(f"{self.target} must not grow beyond {self.nbytes} bytes")
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            return file.tell()

    def finish(self) -> bool:
        """Whether the content is right. If it is not, nothing is left of it."""
        self.append(b"")  # an empty file has had no pieces
        if self.have() != self.nbytes or file_sha256(self.partial) != self.sha256:
            self.discard()
            return False
        rename_durably(self.partial, self.target)
        return True

    def discard(self) -> None:
        self.partial.unlink(missing_ok=True)
