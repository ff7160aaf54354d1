"""Distributed checkpoints: all processes of a run save one checkpoint, into a shared folder or one folder per machine.

Every process writes its own layers; the manifest lists the files of all processes with their hashes. Any folder that
contains all listed files is a complete checkpoint.
"""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from torch import Tensor

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.codec_state import codec_state_hashes, refuse_drift
from thinpipe.checkpoint.storage import FileEntry
from thinpipe.core.bounds import MAX_FILES, LayerFileName, LongText, Sha256, Word
from thinpipe.core.errors import OtherProcessError, UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.run_folder import step_folder
from thinpipe.transport.collectives import Collectives

_LOG = logging.getLogger(__name__)
_MAX_FILES = msgspec.Meta(max_length=MAX_FILES)


class Saver:
    """Saves checkpoints together with all other processes of the run; one process per folder is its leader."""

    def __init__(
        self,
        folder: CheckpointFolder,
        collectives: Collectives,
        *,
        keep_latest: int,
        protected: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        """`protected`: returns paths of older checkpoints that must not be deleted yet. Collective call."""
        self.folder, self.collectives, self.keep_latest, self.protected = folder, collectives, keep_latest, protected
        self.is_leader = is_leader(folder.folder.parent, collectives)

    def save(self, manifest: Manifest, layers: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
        """Saves the layers of this process; all processes must call this with the same manifest.

        Raises OSError in every process if one of them could not write or has non-finite values, which would make the
        checkpoint useless. The checkpoint is then removed, except in a folder that was already committed:
        `latest_common_checkpoint` ignores that one. Raises UserError in every process if the codec state of a boundary
        has drifted apart.
        """
        step, files, problem = manifest.step, dict[str, FileEntry](), _not_finite(layers)
        try:
            if self.is_leader:
                self.folder.begin(step)
        except OSError as error:
            problem = str(error)
        self._raise_if_any_failed(step, problem)
        try:
            files = self.folder.write(step, layers)
        except OSError as error:
            problem = str(error)
        self._raise_if_any_failed(step, problem)
        written = Written(files=files, codec_states=codec_state_hashes(layers))
        others = [
            decode_foreign(announced, Written, form="json")
            for announced in self.collectives.all_gather_bytes(msgspec.json.encode(written))
        ]
        files = _union(files, [other.files for other in others], step)
        codec_states = {layer: hashes for other in others for layer, hashes in other.codec_states.items()}
        try:
            refuse_drift(codec_states, step)
        except UserError:
            if self.is_leader:
                self.folder.discard(step)
            raise
        try:
            if self.is_leader:
                self.folder.commit(manifest, files)
        except OSError as error:
            problem = str(error)
        self._raise_if_any_failed(step, problem)
        if self.is_leader:
            try:
                self.folder.keep_latest(self.keep_latest, exempt=self.protected())
            except OSError as error:  # the save succeeded; the next one retries the removal
                _LOG.warning("an older checkpoint could not be removed: %s", error)
        return self.folder.committed(manifest, files)

    def _raise_if_any_failed(self, step: int, problem: str) -> None:
        """Barrier: raises OSError in every process if any process passes a non-empty `problem`."""
        if announced := _first_problem(problem, self.collectives):
            if self.is_leader:
                self.folder.discard(step)
            raise OSError(announced)


class Written(msgspec.Struct, kw_only=True):
    """What a process has written."""

    files: Annotated[dict[LayerFileName, FileEntry], _MAX_FILES]
    codec_states: Annotated[dict[Word, Annotated[dict[Word, Word], _MAX_FILES]], _MAX_FILES]
    """See `codec_state_hashes`."""


def _union(own: Mapping[str, FileEntry], listed: Sequence[Mapping[str, FileEntry]], step: int) -> dict[str, FileEntry]:
    """The files of all processes, by name. `listed`: by rank. About its own files a process believes itself alone,
    about others the first that names them; who says otherwise is named in a warning."""
    files = dict(own)
    for rank, others in enumerate(listed):
        for name, entry in others.items():
            if files.setdefault(name, entry) != entry:
                whose = "this process has written" if name in own else "another process has named"
                _LOG.warning("step %d: process %d names other contents of %s, which %s", step, rank, name, whose)
    return dict(sorted(files.items()))


def _first_problem(problem: str, collectives: Collectives) -> str:
    """The first non-empty `problem` of all processes in rank order, with the rank; empty if there is none. Collective
    call: every process gets the same text, so that all of them raise, or none does."""
    for rank, announced in enumerate(collectives.all_gather_bytes(problem.encode())):
        if announced:
            text = sanitize(announced.decode(errors="replace"), 5000)
            return text if collectives.size == 1 else f"process {rank}: {text}"
    return ""


def _not_finite(layers: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Message about the first non-finite tensor; empty if all are finite."""
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return f"{name} of {layer} is not finite"
    return ""


def is_leader(folder: Path, collectives: Collectives) -> bool:
    """Elects one leader process per folder, shared or not: the first to create a marker file there. Collective call.
    If a process cannot write to its folder, raises UserError with the OSError as its cause in that process, and
    OtherProcessError in the others."""
    token = collectives.broadcast_bytes(secrets.token_hex(8).encode())
    if not re.fullmatch(rb"[0-9a-f]{16}", token):  # it becomes part of a path
        raise ProtocolError(f"process 0 sends a token of {len(token)} bytes that is none")
    marker = folder / f".leader-{token.decode()}"
    first = False
    own: OSError | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        first = True
    except FileExistsError as error:
        own = None if folder.is_dir() else error
    except OSError as error:
        own = error
    problem = _first_problem(str(own or ""), collectives)  # barrier: all have tried to create the marker
    if first:
        marker.unlink()
    if own is not None:
        raise UserError(f"checkpoints cannot be saved: {own}") from own
    if problem:
        raise OtherProcessError(f"checkpoints cannot be saved: {problem}")
    return first


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A process's newest complete checkpoint within the limit of a round of `latest_common_checkpoint`."""

    step: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
    """-1: there is none."""
    files_sha256: Sha256 = ""
    """Hash of the manifest's list of files, which differs between runs."""
    problems: Annotated[list[LongText], msgspec.Meta(max_length=1000)] = []
    """Reasons for which newer checkpoints of the process were passed over."""
    error: LongText = ""
    """Reason for which the folder cannot be read; empty: the folder was read."""


def latest_common_checkpoint(
    folder: CheckpointFolder, layers: list[str], collectives: Collectives, *, optional_layers: Collection[str] = ()
) -> tuple[Checkpoint | None, list[str]]:
    """Newest checkpoint of which every process has its layers intact, and the problems found with newer ones.

    Returns None if no process has a checkpoint. Collective call: the processes agree on the outcome in rounds, each
    limited to the lowest step of the round before. If a process cannot read its folder, or has no checkpoint while
    others have one, raises UserError in that process (with the OSError, if any, as its cause) and OtherProcessError in
    the others. Raises UserError in every process if the checkpoints come from different runs.
    """
    newest, problems, error = _newest_complete(folder, layers, optional_layers, None)
    while True:
        candidate = _candidate(newest, problems, error)
        gathered = collectives.all_gather_bytes(msgspec.json.encode(candidate))
        candidates = [decode_foreign(announced, Candidate, form="json") for announced in gathered]
        steps = [other.step for other in candidates]
        lowest, highest = min(steps), max(steps)
        if error is not None:
            raise UserError(f"process {collectives.rank} cannot read its checkpoints: {error}") from error
        for rank, other in enumerate(candidates):
            if other.error:
                raise OtherProcessError(f"process {rank} cannot read its checkpoints: {other.error}")
        if highest < 0:
            return None, problems
        if lowest < 0:
            text = _some_have_none(candidates, highest)
            raise UserError(text) if newest is None else OtherProcessError(text)
        if lowest == highest:
            break
        if candidate.step > lowest:
            problems = [*problems, f"not every process has step {candidate.step}"]
            newest, older_problems, error = _newest_complete(folder, layers, optional_layers, lowest + 1)
            problems += older_problems
    assert newest is not None
    if len({other.files_sha256 for other in candidates}) > 1:
        raise UserError(
            f"process {collectives.rank} has another step {lowest} in {newest.path} than others: they come from "
            "different runs; keep the folders of one"
        )
    return newest, problems


def _newest_complete(
    folder: CheckpointFolder, layers: list[str], optional_layers: Collection[str], below: int | None
) -> tuple[Checkpoint | None, list[str], OSError | None]:
    """As `CheckpointFolder.newest_complete`, but returns an OSError instead of raising it."""
    try:
        return *folder.newest_complete(layers, optional_layers=optional_layers, below=below), None
    except OSError as error:
        return None, [], error


def _candidate(newest: Checkpoint | None, problems: list[str], error: OSError | None) -> Candidate:
    if newest is None:
        return Candidate(step=-1, problems=problems, error=str(error or ""))
    files_sha256 = hashlib.sha256(msgspec.json.encode(newest.manifest.files)).hexdigest()
    return Candidate(step=newest.manifest.step, files_sha256=files_sha256, problems=problems)


def _some_have_none(candidates: list[Candidate], highest: int) -> str:
    without = [rank for rank, other in enumerate(candidates) if other.step < 0]
    reasons = "".join(f"\n  process {rank}: {problem}" for rank in without for problem in candidates[rank].problems)
    return (
        f"process {', '.join(map(str, without))} has no whole checkpoint in its folder, others have one of step "
        f"{highest}: copy the missing files of checkpoints/{step_folder(highest)} there, from the machines that have "
        f"them{reasons}"
    )
