"""The commits of a hub's run: what peers announce and upload, what becomes a commit, and what peers may fetch.

The ledger decides; here its decisions meet the disk. A file is accepted only from the peer that holds its layer
(`CommitLedger`), and the manifest of a commit is put together here, from what each holder has signed of its own files.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.state import versions
from thinpipe.checkpoint.storage import FileEntry
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, SaveFailed
from thinpipe.core.files import write_atomically
from thinpipe.core.hub_events import FilesRefused, RolledBack
from thinpipe.core.run_folder import step_folder
from thinpipe.swarm.hub.commits.ledger import FalsePartError, Part
from thinpipe.swarm.hub.commits.log import CommitLog
from thinpipe.swarm.hub.commits.lost_files import describe_missing_files, find_missing, set_aside
from thinpipe.swarm.hub.commits.recovery import (
    NEWEST_MANIFEST_FILE,
    SignedCommit,
    describe_replacement,
    open_ledger,
    save_newest_manifest,
)
from thinpipe.swarm.hub.services.files import ExpectedFile, FileRange
from thinpipe.swarm.protocol.messages import AnnouncementReply, CheckpointAnnouncement, RestoreFiles
from thinpipe.swarm.protocol.signed_files import COMMIT_FILE, Maker, SignedFile

_LOG = logging.getLogger(__name__)
_MAX_NAMED = 5
"""Refusals of one peer in one generation that are logged and printed."""


class CommitStore:
    """Base of `TrainingHost`: the part of `RunHost` that is about commits."""

    def __init__(
        self, config: RunConfig, folder: CheckpointFolder, newest: Checkpoint, log: CommitLog, notices: list[str]
    ) -> None:
        self.config, self.checkpoints, self.newest, self.commit_log = config, folder, newest, log
        self._notices = notices
        self._newest_manifest_path = config.job.dump_folder / NEWEST_MANIFEST_FILE
        self._previous: Checkpoint | None = None
        """The commit before `newest`, which standbys may still be mirroring."""
        self.missing: dict[str, str] = find_missing(newest)
        self.ledger = open_ledger(log, newest, notices.append)
        self._stopped = ""
        """Why the run cannot continue; empty if it can."""
        self._public_keys: dict[str, str] = {}
        """Key with which each peer of the generation has signed."""
        self._refused: dict[str, str] = {}
        """See `refusals`; by peer."""
        self._named: Counter[str] = Counter()
        """Refusals of the generation that were logged, by peer."""
        try:
            save_newest_manifest(self._newest_manifest_path, newest.manifest)
        except OSError:  # then only the commit log says which checkpoint is the newest
            _LOG.warning("%s cannot be written", self._newest_manifest_path, exc_info=True)

    def on_event(self, event: AnyEvent) -> None:
        """Shows and logs an event."""
        raise NotImplementedError

    def on_commit(self, checkpoint: Checkpoint, announced: float) -> None:
        """Called after a checkpoint was committed. `announced`: when all peers had announced it."""
        raise NotImplementedError

    def newest_manifest(self) -> bytes:
        return msgspec.json.encode(self.newest.manifest)

    @property
    def committed(self) -> int:
        return self.newest.manifest.step

    @property
    def resume_step(self) -> int:
        return self.ledger.pending_step or self.committed

    def begin_commits(self, generation: int, held: Mapping[str, Collection[str]]) -> None:
        """A generation begins. `held`: the files of the layers of each peer."""
        self.ledger.begin(generation, held)
        self._public_keys, self._refused = {}, {}
        self._named.clear()

    @property
    def refusals(self) -> list[str]:
        """What was last refused of each peer of the generation, in words."""
        return list(self._refused.values())

    def find(self, name: str) -> Path | FileRange | None:
        folder, _, file = name.partition("/")
        for commit in (self.newest, self._previous):
            if commit is not None and folder == commit.path.name and file in (*commit.manifest.files, COMMIT_FILE):
                path = commit.path / file
                return path if path.exists() or file != COMMIT_FILE else None
        return None

    # Announcements: every peer says what it has saved, of its own layers

    def on_checkpoint_announced(
        self, peer: str, announced: CheckpointAnnouncement, public_key: str
    ) -> AnnouncementReply:
        try:
            part = self._own_part(peer, announced)
            answer = self.ledger.announce(peer, announced.generation, part, time.monotonic())
            self._public_keys[peer] = public_key
            if answer == "retry":
                return AnnouncementReply(retry_later=True)
            if answer == "begin":
                self.checkpoints.begin(part.step)
        except FalsePartError as error:
            return self.refuse_announcement(peer, announced.generation, str(error))
        except UserError as error:
            return AnnouncementReply(refusal=str(error))
        except OSError as error:
            self.ledger.abandon_pending()
            return AnnouncementReply(refusal=f"the hub cannot write ({error.strerror or type(error).__name__})")
        return AnnouncementReply(wanted=self.ledger.wanted(peer, part.step))

    def _own_part(self, peer: str, announced: CheckpointAnnouncement) -> Part:
        """What is announced, without files of others' layers, which are left out, and the peer is named. Raises
        FalsePartError if it cannot belong to this run."""
        files = {file.name: file for file in announced.files}
        if len(files) < len(announced.files):
            raise FalsePartError(f"{peer} names a file twice")
        if not 0 < announced.step <= self.config.training.steps:
            raise FalsePartError(f"there is no step {announced.step} in this run")
        since = self.newest.manifest
        samples = since.samples_seen + (announced.step - since.step) * self.config.training.global_batch_size
        if announced.step > since.step and announced.samples_seen != samples:
            raise FalsePartError(f"step {announced.step} is at sample {samples}, and not at {announced.samples_seen}")
        if foreign := self.ledger.foreign_files(peer, files):
            name, holders = next(iter(foreign.items()))
            whose = f"a file of {' and '.join(holders)}" if holders else "no file of this run"
            self._name(peer, announced.generation, f"{peer} announces {name}, which is {whose}")
        return Part(
            step=announced.step,
            samples_seen=announced.samples_seen,
            basis_version=announced.basis_version,
            basis_sha256=announced.basis_sha256,
            files={name: file for name, file in files.items() if name not in foreign},
        )

    def own_files(self, peer: str, announced: CheckpointAnnouncement) -> list[SignedFile]:
        files = {file.name: file for file in announced.files}
        foreign = self.ledger.foreign_files(peer, files)
        return [file for name, file in files.items() if name not in foreign]

    def refuse_announcement(self, peer: str, generation: int, reason: str) -> AnnouncementReply:
        """Refuses what a peer has announced, and says so to the hub's owner."""
        self._name(peer, generation, f"the checkpoint of {peer} was refused: {reason}")
        return AnnouncementReply(refusal=reason)

    def _name(self, peer: str, generation: int, reason: str) -> None:
        """Logs and prints that something was refused, a few times for each peer in a generation: a reason names what
        the peer has made up."""
        if generation != self.ledger.generation or self._refused.get(peer) == reason:
            return
        self._refused[peer] = reason
        self._named[peer] += 1
        if self._named[peer] <= _MAX_NAMED:
            self._record(FilesRefused(step=self.committed, peer=peer, reason=reason))

    def _record(self, event: AnyEvent) -> None:
        raise NotImplementedError

    def drop_peer(self, peer: str) -> None:
        self.ledger.drop_peer(peer)

    # Uploads

    def accept(self, peer: str, name: str) -> ExpectedFile | None:
        """The file, if this peer may upload it now: its own files of the pending checkpoint; any file of the newest
        commit, of which the hub knows the hash, so that lost files can come from anybody."""
        folder, _, file = name.partition("/")
        newest, pending_step = self.newest, self.ledger.pending_step
        if folder == newest.path.name:
            entry = newest.manifest.files.get(file)
            place = newest.path
        elif pending_step is not None and folder == step_folder(pending_step):
            expected = self.ledger.expected(peer, pending_step, file)
            entry = None if expected is None else FileEntry(nbytes=expected.nbytes, sha256=expected.sha256)
            place = self.checkpoints.partial(pending_step)
        else:
            return None
        return None if entry is None else ExpectedFile(target=place / file, nbytes=entry.nbytes, sha256=entry.sha256)

    def on_file_saved(self, peer: str, name: str) -> None:
        folder, _, file = name.partition("/")
        pending_step = self.ledger.pending_step
        if folder == step_folder(self.committed):
            self.missing.pop(file, None)
        elif pending_step is not None and folder == step_folder(pending_step):
            self.ledger.on_file_received(peer, pending_step, file)
            try:
                self._commit_if_whole()
            except OSError as error:
                self.on_save_failed(peer, name, error.strerror or type(error).__name__)

    def on_save_failed(self, peer: str, name: str, why: str) -> None:
        """Gives up the pending checkpoint, which cannot become complete, so that the next one need not wait for it."""
        folder, step, pending_step = name.partition("/")[0], self.committed, self.ledger.pending_step
        if pending_step is not None and folder == step_folder(pending_step):
            step = pending_step
            self.ledger.abandon_pending()
        elif folder != step_folder(step):
            return  # the checkpoint was already given up
        self.on_event(SaveFailed(step=step, reason=f"the hub cannot write {name} of {peer}: {why}"))

    def _commit_if_whole(self) -> None:
        """Commits the pending checkpoint if it is complete. Order for crash safety: first the checkpoint is durable,
        then its record in the commit log; only then does it become `newest`, which peers get."""
        commit = self.ledger.complete
        if commit is None:
            return
        manifest = self._manifest_of_pending()
        record = SignedCommit(**msgspec.structs.asdict(commit), makers=self._makers())
        write_atomically(self.checkpoints.partial(commit.step) / COMMIT_FILE, msgspec.json.encode(record))
        checkpoint = self.checkpoints.commit(manifest, manifest.files)
        save_newest_manifest(self._newest_manifest_path, checkpoint.manifest)
        if not self.ledger.is_recorded(commit):
            self.commit_log.append(commit)
            if commit.replaces:
                self._notices.append(describe_replacement(commit))
        announced = self.ledger.pending_since
        self.ledger.mark_committed(commit)
        self.newest, self._previous, self.missing = checkpoint, self.newest, {}
        self.on_commit(checkpoint, announced)
        try:
            self.checkpoints.keep_latest(self.config.checkpoint.keep_latest_k)
        except OSError:
            _LOG.warning("old checkpoints cannot be removed; trying again after the next commit", exc_info=True)

    def _manifest_of_pending(self) -> Manifest:
        """Put together from the announcements, and from what the hub knows itself of its run."""
        commit, files = self.ledger.complete, self.ledger.signed_files
        assert commit is not None
        before = msgspec.json.decode(self.newest_manifest(), type=Manifest)  # tuples become lists, as when it is read
        return msgspec.structs.replace(
            before,
            step=commit.step,
            samples_seen=commit.samples_seen,
            basis_version=commit.basis_version,
            basis_sha256=commit.basis_sha256,
            run=dump_toml(self.config),
            versions=versions(),
            files={name: FileEntry(nbytes=file.nbytes, sha256=file.sha256) for name, (_, file) in files.items()},
        ).with_checksum()

    def _makers(self) -> dict[str, Maker]:
        return {
            name: Maker(
                peer=peer,
                public_key=self._public_keys[peer],
                generation=self.ledger.generation,
                signature=file.signature,
            )
            for name, (peer, file) in self.ledger.signed_files.items()
        }

    # Files of the newest checkpoint that were lost at the hub

    async def verify_newest(self) -> None:
        newest = self.newest
        missing = await asyncio.to_thread(find_missing, newest)
        if self.newest is newest:  # else a newer, complete commit was made meanwhile
            self.missing = missing

    def restore_request(self) -> RestoreFiles:
        self.ledger.abandon_pending()
        step, manifest = self.committed, self.newest.manifest.sha256
        text = f"the hub has lost {len(self.missing)} file(s) of step {step}: uploading the copies stored here"
        return RestoreFiles(step=step, files=dict(self.missing), manifest=manifest, text=text)

    def describe_missing(self, present: Collection[str], absent: Collection[str]) -> str:
        return describe_missing_files(self.committed, self.ledger.holders_of(self.missing), present, absent)

    def roll_back(self, present: Collection[str], absent: Collection[str]) -> RolledBack | str:
        lost, why = self.newest, self.describe_missing(present, absent)
        try:
            older, _ = self.checkpoints.newest_complete(layers=(), below=lost.manifest.step)
            if older is None and absent:
                return f"{why}, and there is no older checkpoint: waiting for {', '.join(sorted(absent))} to connect"
            if older is None:
                raise UserError("there is no older checkpoint")
            save_newest_manifest(self._newest_manifest_path, older.manifest)
            folder = set_aside(lost)
        except (UserError, OSError) as error:
            self._stopped = f"{why}, and {error}"
            return f"the run cannot continue: {self._stopped}"
        self.newest, self._previous, self.missing = older, None, {}
        self.ledger.roll_back(self.committed)
        return RolledBack(step=self.committed, lost_step=lost.manifest.step, reason=why, folder=str(folder))
