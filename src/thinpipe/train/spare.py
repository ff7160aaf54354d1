"""What a spare does while others compute: it keeps a copy of the hub's newest checkpoint, and so begins at once.

One file at a time, on a part of its line, in a thread of its own. What it has not got by then is fetched when needed.
"""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Manifest
from thinpipe.checkpoint.folder import MANIFEST, FileEntry, step_folder
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.file_asks import Pace
from thinpipe.swarm.file_requests import MOST_NBYTES, is_plain
from thinpipe.swarm.file_transfer import fetch
from thinpipe.swarm.partial_file import PartialFile
from thinpipe.transport.nats.post import Post

LINE_SHARE = 0.25
"""Of what the line can take: the hub's own line is busy with the messages of those who compute."""
_FREE_NBYTES = 1 << 30
"""Of the disk, that are left alone."""


_STOP_SECONDS = 0.1
"""What one piece takes: so long it is before we can stop."""


class _StoppedError(Exception):
    pass


class Spare:
    """`follow` what the hub has, `stop` when there is something else to do. Both return at once, or nearly so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints"
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._whole: tuple[bytes, Manifest | None] = b"", None
        """What we have all files of."""
        self._copies: set[Path] = set()
        """Folders that are nothing but copies."""
        self.problem = ""
        """Why there can be no copy."""

    def follow(self, post: Post, manifest: bytes, *, bytes_per_second: float | None) -> None:
        """Does nothing while it copies, or when it has this one."""
        if not manifest or manifest == self._whole[0] or (self._thread is not None and self._thread.is_alive()):
            return
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(post, manifest, bytes_per_second), name="thinpipe-spare", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """What is fetched stays, and is the run's from now on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._whole, self._copies = None, (b"", None), set()

    def _run(self, post: Post, manifest: bytes, bytes_per_second: float | None) -> None:
        try:
            told = msgspec.json.decode(manifest, type=Manifest)
            self._copy(post, told, bytes_per_second)
            self._whole, self.problem = (manifest, told), ""
        except (_StoppedError, OSError, UserError, msgspec.MsgspecError):
            pass  # the hub has a newer one by now, or is lost: we hear what it has when we ask again

    def _copy(self, post: Post, manifest: Manifest, bytes_per_second: float | None) -> None:
        step = step_folder(manifest.step)
        target = self._folder / step
        before = self._whole[1]
        self._forget_all_but(target, *(() if before is None else (self._folder / step_folder(before.step),)))
        if not target.exists():
            self._copies.add(target)
        missing = {name: entry for name, entry in manifest.files.items() if not self._have(target, name, entry)}
        self._refuse_full_disk(missing)
        pace = Pace(bytes_per_second)
        piece = MOST_NBYTES if bytes_per_second is None else max(16 << 10, int(bytes_per_second * _STOP_SECONDS))
        for name, entry in missing.items():
            fetch(
                post,
                f"{step}/{name}",
                target / name,
                nbytes=entry.nbytes,
                sha256=entry.sha256,
                progress=self._go_on,
                window=2,
                piece_nbytes=piece,
                pace=pace,
            )
            self._go_on()
        write_atomically(target / MANIFEST, msgspec.json.encode(manifest))
        for path in self._folder.glob("step-*"):  # also what an earlier life, or the run, has left here
            if path.name < target.name:
                shutil.rmtree(path, ignore_errors=True)

    def _have(self, target: Path, name: str, entry: FileEntry) -> bool:
        """Also one that has not changed since the last checkpoint."""
        self._go_on()
        if not is_plain(f"{target.name}/{name}"):
            raise UserError(f"the hub wants to write to {name[:80]!r} here: it is no hub to trust")
        file = PartialFile(target / name, nbytes=entry.nbytes, sha256=entry.sha256)
        if file.is_whole():
            return True
        before = self._whole[1]
        if before is None or before.files.get(name) != entry:
            return False
        older = PartialFile(self._folder / step_folder(before.step) / name, nbytes=entry.nbytes, sha256=entry.sha256)
        if not older.is_whole():
            return False
        target.mkdir(parents=True, exist_ok=True)
        file.target.unlink(missing_ok=True)
        with suppress(OSError):  # a disk without links: it is fetched
            os.link(older.target, file.target)
            return True
        return False

    def _refuse_full_disk(self, missing: dict[str, FileEntry]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        nbytes, free = sum(entry.nbytes for entry in missing.values()), shutil.disk_usage(self._folder).free
        if nbytes + _FREE_NBYTES > free:
            self.problem = (
                f"a copy of the model would take {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in "
                f"{self._folder}: this spare fetches its part when it is needed"
            )
            raise _StoppedError

    def _forget_all_but(self, *needed: Path) -> None:
        """Of our copies; what was saved here by the run itself stays."""
        for path in self._copies - set(needed):
            shutil.rmtree(path, ignore_errors=True)
        self._copies &= set(needed)

    def _go_on(self, *_: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
