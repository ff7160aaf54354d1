"""The run environment of a peer: token batches, layers and stop requests come from the hub; events and saved
checkpoints go to it."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from rich.console import Console

from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.checkpoint.storage import FileEntry, layer_file, received_manifest
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Saved, Started
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.hashing import text_sha256
from thinpipe.core.hub_events import GenerationStarted, PeerAssignment
from thinpipe.core.run_folder import checkpoints_path, step_folder
from thinpipe.core.token_flags import ID_MASK
from thinpipe.data import Cursor
from thinpipe.swarm.peer.download_report import DownloadReport
from thinpipe.swarm.peer.file_transfer import OnProgress, fetch, push, stat, stat_message
from thinpipe.swarm.peer.hub_collectives import HubCollectives
from thinpipe.swarm.peer.request_pipeline import FileTransferError, RateLimiter
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import (
    MAX_UPLOAD_SECONDS,
    AnnouncementReply,
    Assignment,
    CheckpointAnnouncement,
    EventReport,
    LeaveRequest,
    ReadyReply,
    ReadyRequest,
    TokensRequest,
    is_near,
)
from thinpipe.swarm.protocol.signed_files import COMMIT_FILE, Occasion, Provenance, sign_file
from thinpipe.training.data_loading import DatasetInfo, token_dtype, tokenizer_sha256
from thinpipe.training.engine import Ids
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.transport.collectives import Collectives, collectives_for
from thinpipe.transport.nats.broadcasts import STOP
from thinpipe.transport.nats.connection import HubConnection

_LOG = logging.getLogger(__name__)
_SECONDS, _RETRY_SECONDS = 60.0, 0.25
"""`_SECONDS`: timeout of a request to the hub. `_RETRY_SECONDS`: pause before a request is repeated."""
_ANNOUNCE_SECONDS = 5.0
"""Timeout, in seconds, of the announcement that this peer leaves, for which a step's all-reduce waits."""
_BATCHES_AHEAD = 2
"""Number of batches prefetched beyond the current one."""
_OVER = "the hub has ended the generation"

PrintLine = Callable[[str], None]
"""Prints a line of text for the peer's user."""


class RemoteTokens:
    """`TokenSource` that requests batches from the hub. Prefetches, so that the round trip to the hub costs no time."""

    def __init__(self, connection: HubConnection, dataset_info: DatasetInfo, config: RunConfig) -> None:
        self._connection, self.dataset_info = connection, dataset_info
        self._batch, self._seq_len = config.training.global_batch_size, config.training.seq_len
        self._dtype = token_dtype(dataset_info.vocab_size, chats=dataset_info.chats)
        self._in_flight: dict[tuple[str, int], Future[bytes]] = {}

    def batch(self, cursor: Cursor) -> Ids:
        ahead = [cursor.samples_seen + number * self._batch for number in range(_BATCHES_AHEAD + 1)]
        return self._take("train", ahead)

    @property
    def validation(self) -> Iterator[Ids]:
        """All validation batches, in order."""
        count = self.dataset_info.validation_batches
        for index in range(count):
            yield self._take("validation", range(index, min(count, index + _BATCHES_AHEAD + 1)))

    def save_tokenizer(self, folder: Path) -> None:
        """Nothing to do: `RemoteRun.fetch` downloads the tokenizer."""

    def _take(self, split: str, indices: Collection[int]) -> Ids:
        """Returns the batch at the first of these indices and requests the others. Raises ConnectionError if the
        generation is over."""
        for index in indices:
            if (split, index) not in self._in_flight:
                request = TokensRequest(split=split, index=index)  # type: ignore[arg-type]
                data = msgspec.msgpack.encode(request)
                self._in_flight[split, index] = self._connection.submit("tokens", data, seconds=_SECONDS, bulk=True)
        wanted = next(iter(indices))
        data = self._connection.await_reply(self._in_flight.pop((split, wanted)), seconds=_SECONDS)
        for key in [key for key in self._in_flight if key[0] == split and key[1] not in indices]:
            self._in_flight.pop(key).cancel()
        if not data:
            raise ConnectionError(_OVER)
        ids = np.frombuffer(data, self._dtype)
        if ids.size != self._batch * (self._seq_len + 1):
            raise ConnectionError(
                f"the hub sent {ids.size} token ids instead of a batch of {self._batch} x {self._seq_len + 1}"
            )
        self._refuse_strange_ids(ids & np.uint32(ID_MASK) if self.dataset_info.chats else ids)
        return ids.reshape(self._batch, self._seq_len + 1).astype(np.int64)

    def _refuse_strange_ids(self, ids: npt.NDArray[np.unsignedinteger]) -> None:
        if (largest := int(ids.max())) >= self.dataset_info.vocab_size:
            raise ConnectionError(f"the hub sent id {largest} of a vocabulary of {self.dataset_info.vocab_size}")


class RemoteRun(RunEnvironment):
    """Run environment for one generation; see `RunEnvironment`. `close` waits until the uploads of saved checkpoints
    are done."""

    has_own_places = True
    stopping_text = (
        "leaving after this step, once it is saved and sent to the hub; Ctrl+C again ends it at once, and the others "
        "go back to the newest commit"
    )

    def __init__(
        self,
        connection: HubConnection,
        assignment: Assignment,
        config: RunConfig,
        print_line: PrintLine,
        console: Console | None = None,
    ) -> None:
        self.console = console
        self._connection, self._assignment, self._config, self._print = connection, assignment, config, print_line
        self._folder = config.job.dump_folder
        self._manifest = received_manifest(assignment.manifest)
        self._is_first = assignment.names[0] == connection.address.name
        self.tokens = RemoteTokens(
            connection, decode_foreign(assignment.dataset_info, DatasetInfo, form="json"), config
        )
        self._stop = threading.Event()
        self._cancel = connection.subscribe_broadcast(STOP, lambda _data: self._stop.set())
        rate = assignment.upload_bytes_per_second.get(connection.address.name)
        self._uploader = Uploader(
            connection, assignment.generation, print_line, bytes_per_second=rate, committed=self._manifest.step
        )
        self._own_files: list[str] = []
        """Checkpoint files of this peer's layers."""
        self._has_announced_leave = False

    def collectives(self, group: dist.ProcessGroup | None) -> Collectives:
        if group is None:
            return collectives_for(None)
        timeout = self._config.parallelism.timeout_seconds
        return HubCollectives(group, self._connection, self._assignment.generation, timeout_seconds=timeout)

    def before_stop_request(self) -> None:
        """Announces once that this peer's user has asked it to leave, so that the hub knows which peer ends the
        generation before any other peer does. Training goes on without a confirmation: the hub can do without the
        announcement."""
        if self._has_announced_leave:
            return
        self._has_announced_leave = True
        request = LeaveRequest(incarnation=self._connection.activity.heartbeat().incarnation, after_saving=True)
        try:
            self._connection.request("leave", msgspec.msgpack.encode(request), seconds=_ANNOUNCE_SECONDS)
        except (ConnectionError, TimeoutError) as error:
            _LOG.info("the hub has not confirmed that this peer leaves: %s", sanitize(error))

    def step(self) -> AbstractContextManager[None]:
        return self._connection.activity.step()

    def fetch(self, layers: Collection[str], optional_layers: Collection[str]) -> None:
        step = step_folder(self._manifest.step)
        target = checkpoints_path(self._folder) / step
        files = [layer_file(layer) for layer in dict.fromkeys((*layers, *optional_layers))]
        self._own_files = files
        wanted = {name: self._manifest.files[name] for name in files if name in self._manifest.files}
        of_step = f"the files of step {self._manifest.step} for this machine's segments"
        report = DownloadReport(of_step, sum(entry.nbytes for entry in wanted.values()), self._print)
        for name, entry in wanted.items():
            self._fetch(f"{step}/{name}", target / name, entry.nbytes, entry.sha256, report.file(entry.nbytes))
        self._check_makers(wanted)
        for name in self._assignment.tokenizer:
            found = stat(self._connection, name)
            self._fetch(name, self._folder / name, found.nbytes, found.sha256)

    def _check_makers(self, files: Mapping[str, FileEntry]) -> None:
        """Says which of these files of the newest commit are not signed by who made them, according to the commit's
        record at the hub. The checkpoint of step 0 is made by the hub, and earlier versions sign nothing."""
        name = f"{step_folder(self._manifest.step)}/{COMMIT_FILE}"
        path = checkpoints_path(self._folder) / name
        try:
            found = stat_message(self._connection, name)
        except ProtocolError as error:
            _LOG.warning("%s of the hub is not read: %s", COMMIT_FILE, error)
            return
        except FileTransferError:
            return
        self._fetch(name, path, found.nbytes, found.sha256)
        try:
            provenance = decode_foreign(path.read_bytes(), Provenance, form="json")
        except ProtocolError as error:
            _LOG.warning("%s of the hub cannot be read: %s", COMMIT_FILE, error)
            return
        known = {name: (entry.nbytes, entry.sha256) for name, entry in files.items()}
        unproven = provenance.unproven(known, self._connection.address.fingerprint, self._manifest.step)
        if provenance.makers and unproven:
            self._print(
                f"step {self._manifest.step}: who made {sanitize(', '.join(unproven))} cannot be shown, because the "
                "signature is wrong: ask the hub's owner whether files were changed by hand"
            )

    def _fetch(self, name: str, target: Path, nbytes: int, sha256: str, progress: OnProgress | None = None) -> None:
        """Downloads a file. A bad file at the hub ends the generation (ConnectionError), not this process: the hub
        looks for another copy. Errors of the local disk are raised as FileTransferError."""
        try:
            fetch(self._connection, name, target, nbytes=nbytes, sha256=sha256, progress=progress)
        except FileTransferError as error:
            if isinstance(error.__cause__, OSError):  # the local disk
                raise
            raise ConnectionError(str(error)) from error

    def ready(self, hashes: Mapping[str, str]) -> None:
        ours = {
            "settings": text_sha256(self._assignment.settings),
            "tokenizer": tokenizer_sha256({name: self._folder / name for name in self._assignment.tokenizer}),
        }
        request = msgspec.msgpack.encode(
            ReadyRequest(generation=self._assignment.generation, hashes=ours | dict(hashes))
        )
        answer = decode_foreign(self._connection.request("ready", request, seconds=_SECONDS), ReadyReply)
        if answer.generation_over:
            raise ConnectionError(_OVER)
        if answer.refusal:
            raise UserError(f"the hub refused: {answer.refusal}")

    def on_event(self, event: AnyEvent) -> None:
        if self._is_first:
            report = EventReport(generation=self._assignment.generation, event=msgspec.json.encode(event))
            self._connection.publish("event", msgspec.msgpack.encode(report))
        if isinstance(event, Saved):
            self._uploader.enqueue(Path(event.path), self._own_files)

    def own_event(self, started: Started) -> GenerationStarted:
        places = zip(self._assignment.names, started.segments, started.device_classes, strict=True)
        peers = [PeerAssignment(name=name, segments=held, device_class=found) for name, held, found in places]
        return GenerationStarted(generation=self._assignment.generation, step=started.step, peers=peers)

    def stop_text(self, *, own: bool) -> str:
        return "all is saved" if own else "another machine leaves, or the hub's owner stops the run: all is saved"

    def lost_text(self, finished: int, saved: int) -> str:
        del saved
        return (
            f"ended without saving step {finished}: the others go back to the newest commit. "
            f"`thinpipe join {self._folder}` rejoins"
        )

    def asked_to_stop(self) -> bool:
        return self._stop.is_set()

    def name_of(self, process: int) -> str:
        return self._assignment.names[process]

    def may_accuse(self, step: int) -> bool:
        return len(self._assignment.names) > 1 and not is_near(step, self._assignment.diverged_steps)

    def protected(self) -> Collection[Path]:
        return self._uploader.protected(checkpoints_path(self._folder))

    def close(self) -> None:
        self._cancel()
        self._uploader.close()


class Uploader:
    """Uploads saved checkpoints to the hub in a background thread while training goes on; of several waiting
    checkpoints only the newest.

    `bytes_per_second`: rate limit until `close`; None: unlimited. `committed`: step of the hub's newest commit.
    """

    def __init__(
        self,
        connection: HubConnection,
        generation: int,
        print_line: PrintLine,
        *,
        bytes_per_second: float | None = None,
        committed: int = 0,
    ) -> None:
        self._connection, self._generation, self._print = connection, generation, print_line
        self._rate_limiter = RateLimiter(bytes_per_second)
        self._committed = committed
        self._sent: Path | None = None
        self._changed = threading.Condition()
        self._waiting: tuple[Path, list[str]] | None = None
        self._closing = False
        self._sending: Path | None = None
        self._thread = threading.Thread(target=self._run, name="thinpipe-uploader", daemon=True)
        self._thread.start()

    def enqueue(self, path: Path, files: list[str]) -> None:
        """Schedules an upload of these files; replaces a checkpoint that is still waiting."""
        with self._changed:
            self._waiting = path, files
            self._changed.notify()

    def protected(self, checkpoints: Path) -> Collection[Path]:
        """Checkpoints that must not be deleted: the hub's newest known commit and the last one uploaded since, so that
        a second copy of this peer's part exists, and the one being uploaded."""
        committed = checkpoints / step_folder(self._committed)
        return [path for path in (committed, self._sent, self._sending) if path is not None]

    def close(self) -> None:
        """Lifts the rate limit and waits until a waiting checkpoint is uploaded."""
        self._rate_limiter.disable()
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                (path, files), self._waiting = self._waiting, None
                self._sending = path
            try:
                if self._send(path, files):
                    self._sent = path
            except (OSError, UserError) as error:  # not fatal: a lost hub ends the generation elsewhere
                self._print(f"could not upload {path.name} to the hub: {error}")
                _LOG.info("upload of %s failed: %s", path.name, sanitize(error))
            finally:
                self._sending = None

    def _send(self, path: Path, files: list[str]) -> bool:
        """Announces and uploads a checkpoint. False: a newer one is waiting, and nothing was uploaded."""
        manifest = Checkpoint.open(path, layers=()).manifest
        wanted = self._announce(self._announcement(manifest, files))
        if wanted is None:
            return False  # in favour of the newer one
        for name in files:
            if name in wanted:
                push(self._connection, path / name, f"{path.name}/{name}", rate_limiter=self._rate_limiter)
        return True

    def _announcement(self, manifest: Manifest, files: list[str]) -> CheckpointAnnouncement:
        """What this peer has saved, signed with its key."""
        address = self._connection.address
        occasion = Occasion(run=address.fingerprint, generation=self._generation, step=manifest.step)
        key, own = (
            KeyPair.from_seed(address.credentials.seed),
            {name: manifest.files[name] for name in files if name in manifest.files},
        )
        return CheckpointAnnouncement(
            generation=self._generation,
            step=manifest.step,
            samples_seen=manifest.samples_seen,
            basis_version=manifest.basis_version,
            basis_sha256=manifest.basis_sha256,
            files=[sign_file(key, occasion, name, entry.nbytes, entry.sha256) for name, entry in own.items()],
        )

    def _announce(self, announcement: CheckpointAnnouncement) -> list[str] | None:
        """Announces the checkpoint, again and again until all peers have announced it and the hub has received an
        older one. Returns the files to upload; None: a newer checkpoint of this peer is waiting. Raises UserError if
        the hub refuses."""
        request, deadline = msgspec.msgpack.encode(announcement), time.monotonic() + MAX_UPLOAD_SECONDS
        while time.monotonic() < deadline:
            answer = decode_foreign(
                self._connection.request("checkpoint", request, seconds=_SECONDS), AnnouncementReply
            )
            if answer.refusal:
                raise UserError(answer.refusal)
            self._committed = max(self._committed, answer.committed)
            if not answer.retry_later:
                return answer.wanted
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None, timeout=_RETRY_SECONDS):
                    return None
        raise UserError(f"other peers have not announced or uploaded their part within {MAX_UPLOAD_SECONDS:.0f} s")
