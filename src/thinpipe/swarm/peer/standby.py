"""What a standby peer does while others compute: it mirrors the hub's newest checkpoint, so that it can start at once.

Copies one file at a time, at a fraction of the downlink, in a background thread. Files that are still missing when the
standby is assigned to a generation are fetched then.
"""

import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Manifest
from thinpipe.checkpoint.storage import FileEntry, received_manifest
from thinpipe.config.huggingface_model import HUGGINGFACE
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import sanitize
from thinpipe.core.run_folder import MANIFEST, checkpoints_path, step_folder, step_folders
from thinpipe.swarm.peer.base_transfer import BaseTransfer
from thinpipe.swarm.peer.file_transfer import fetch
from thinpipe.swarm.peer.request_pipeline import RateLimiter
from thinpipe.swarm.protocol.file_messages import MAX_CHUNK_NBYTES
from thinpipe.swarm.protocol.partial_file import PartialFile
from thinpipe.transport.nats.connection import HubConnection

_LOG = logging.getLogger(__name__)
LINK_SHARE = 0.25
"""Fraction of the peer's downlink rate used for mirroring: the hub's link is busy with the messages of computing
peers."""
_FREE_NBYTES = 1 << 30
"""Bytes of disk space that a mirror leaves free."""


_STOP_SECONDS = 0.1
"""Duration of one chunk in seconds, and so the delay until `stop` takes effect."""


class _StoppedError(Exception):
    """Mirroring was stopped, or there is too little disk space for it."""

    pass


class StandbyMirror:
    """Background copy of the hub's newest checkpoint. Call `follow` with the newest manifest and `stop` before doing
    anything else; `follow` returns at once, `stop` within about one chunk."""

    def __init__(self, folder: Path, base_transfer: BaseTransfer | None = None) -> None:
        self._folder, self._base_transfer = checkpoints_path(folder), base_transfer
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._mirrored: tuple[bytes, Manifest | None] = b"", None
        """The manifest (as received, and decoded) of which all files are here."""
        self._copies: set[Path] = set()
        """Checkpoint folders that this mirror created and may delete."""
        self._asked_model_hub = False
        self.problem = ""
        """Why the checkpoint cannot be mirrored, in words; empty if it can."""

    def follow(self, connection: HubConnection, manifest: bytes, *, bytes_per_second: float | None) -> None:
        """Starts mirroring this manifest (JSON), unless it is mirrored already or an earlier copy is still in
        progress."""
        if not manifest or manifest == self._mirrored[0] or (self._thread is not None and self._thread.is_alive()):
            return
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(connection, manifest, bytes_per_second), name="thinpipe-standby-mirror", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops mirroring. Files already fetched stay, and belong to the run from now on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._mirrored, self._copies = None, (b"", None), set()

    def _run(self, connection: HubConnection, manifest: bytes, bytes_per_second: float | None) -> None:
        """Thread: mirrors one checkpoint."""
        try:
            announced = received_manifest(manifest)
            self._copy(connection, announced, bytes_per_second)
            self._mirrored, self.problem = (manifest, announced), ""
        except _StoppedError:
            pass
        except (OSError, UserError) as error:  # tried again after the hub's next answer
            _LOG.warning("the newest checkpoint could not be mirrored: %s", sanitize(error))

    def _copy(self, connection: HubConnection, manifest: Manifest, bytes_per_second: float | None) -> None:
        """Fetches the missing files, writes the manifest and deletes older checkpoints; then the base, of which it may
        need any part."""
        step = step_folder(manifest.step)
        target = self._folder / step
        before = self._mirrored[1]
        self._remove_mirrors_except(target, *(() if before is None else (self._folder / step_folder(before.step),)))
        if not target.exists():
            self._copies.add(target)
        missing = {name: entry for name, entry in manifest.files.items() if not self._is_stored(target, name, entry)}
        self._refuse_full_disk(missing)
        rate_limiter = RateLimiter(bytes_per_second)
        piece = MAX_CHUNK_NBYTES if bytes_per_second is None else max(16 << 10, int(bytes_per_second * _STOP_SECONDS))
        for name, entry in missing.items():
            fetch(
                connection,
                f"{step}/{name}",
                target / name,
                nbytes=entry.nbytes,
                sha256=entry.sha256,
                progress=self._raise_if_stopped,
                window=2,
                chunk_nbytes=piece,
                rate_limiter=rate_limiter,
            )
            self._raise_if_stopped()
        write_atomically(target / MANIFEST, msgspec.json.encode(manifest))
        for path in step_folders(self._folder):  # also those of earlier processes and of the run itself
            if path.name < target.name:
                shutil.rmtree(path, ignore_errors=True)
        if manifest.family == HUGGINGFACE and self._base_transfer is not None:
            self._warm_base(self._base_transfer, connection, manifest, rate_limiter, piece)

    def _warm_base(
        self,
        transfer: BaseTransfer,
        connection: HubConnection,
        manifest: Manifest,
        rate_limiter: RateLimiter,
        piece: int,
    ) -> None:
        tensors = transfer.learn(connection, manifest).tensors
        try:
            missing = transfer.missing(tensors)
        except UserError as error:
            self.problem = f"{error}; until then this standby downloads its layers when it is assigned"
            raise _StoppedError from error
        if not transfer.names_a_model_hub:
            transfer.bring(
                connection, missing, rate_limiter=rate_limiter, chunk_nbytes=piece, progress=self._raise_if_stopped
            )
        elif missing and not self._asked_model_hub:
            self._asked_model_hub = True  # in a thread that nobody waits for: who is assigned goes on with its download
            threading.Thread(target=transfer.from_a_model_hub, args=(missing,), daemon=True).start()

    def _is_stored(self, target: Path, name: str, entry: FileEntry) -> bool:
        """True if the file is here. An unchanged file of the previously mirrored checkpoint is hard-linked."""
        self._raise_if_stopped()
        file = PartialFile(target / name, nbytes=entry.nbytes, sha256=entry.sha256)
        if file.is_complete():
            return True
        before = self._mirrored[1]
        if before is None or before.files.get(name) != entry:
            return False
        older = PartialFile(self._folder / step_folder(before.step) / name, nbytes=entry.nbytes, sha256=entry.sha256)
        if not older.is_complete():
            return False
        target.mkdir(parents=True, exist_ok=True)
        file.target.unlink(missing_ok=True)
        with suppress(OSError):  # no hard links on this file system: the file is fetched
            os.link(older.target, file.target)
            return True
        return False

    def _refuse_full_disk(self, missing: dict[str, FileEntry]) -> None:
        """Sets `problem` and raises `_StoppedError` if the missing files would not leave `_FREE_NBYTES` free."""
        self._folder.mkdir(parents=True, exist_ok=True)
        nbytes, free = sum(entry.nbytes for entry in missing.values()), shutil.disk_usage(self._folder).free
        if nbytes + _FREE_NBYTES > free:
            self.problem = (
                f"too little free disk space in {self._folder} for a copy of the checkpoint ({nbytes / 1e9:.1f} GB; "
                f"{free / 1e9:.1f} GB are free): this standby downloads its layers when it is assigned"
            )
            raise _StoppedError

    def _remove_mirrors_except(self, *protected: Path) -> None:
        """Deletes folders created by this mirror, except these. Checkpoints saved by the run itself stay."""
        for path in self._copies - set(protected):
            shutil.rmtree(path, ignore_errors=True)
        self._copies &= set(protected)

    def _raise_if_stopped(self, *_: int) -> None:
        """Progress callback that aborts a transfer after `stop`."""
        if self._stop.is_set():
            raise _StoppedError
