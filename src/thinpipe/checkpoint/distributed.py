"""Distributed checkpoints: all processes of a run save one checkpoint, into a shared folder or one folder per machine.

Every process writes its own layers; the manifest lists the files of all processes with their hashes. Any folder that
contains all listed files is a complete checkpoint.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from torch import Tensor

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.storage import FileEntry, step_folder
from thinpipe.core.errors import UserError
from thinpipe.transport.collectives import Collectives


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
        `latest_common_checkpoint` ignores that one.
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
        for announced in self.collectives.all_gather_bytes(msgspec.json.encode(files)):
            files |= msgspec.json.decode(announced, type=dict[str, FileEntry])
        files = dict(sorted(files.items()))
        try:
            if self.is_leader:
                self.folder.commit(manifest, files)
        except OSError as error:
            problem = str(error)
        self._raise_if_any_failed(step, problem)
        if self.is_leader:
            with suppress(OSError):  # the save succeeded; the next one retries the removal
                self.folder.keep_latest(self.keep_latest, exempt=self.protected())
        return self.folder.committed(manifest, files)

    def _raise_if_any_failed(self, step: int, problem: str) -> None:
        """Barrier: raises OSError in every process if any process passes a non-empty `problem`."""
        problems = [announced.decode() for announced in self.collectives.all_gather_bytes(problem.encode())]
        for rank, announced in enumerate(problems):
            if announced:
                if self.is_leader:
                    self.folder.discard(step)
                raise OSError(announced if self.collectives.size == 1 else f"process {rank}: {announced}")


def _not_finite(layers: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Message about the first non-finite tensor; empty if all are finite."""
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return f"{name} of {layer} is not finite"
    return ""


def is_leader(folder: Path, collectives: Collectives) -> bool:
    """Elects one leader process per folder, shared or not: the first to create a marker file there. Collective call."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / f".leader-{collectives.broadcast_bytes(secrets.token_hex(8).encode()).decode()}"
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        first = True
    except FileExistsError:
        first = False
    collectives.all_reduce_sum([0.0])  # barrier: all have tried to create the marker
    if first:
        marker.unlink()
    return first


def latest_common_checkpoint(
    folder: CheckpointFolder, layers: list[str], collectives: Collectives, *, optional_layers: Collection[str] = ()
) -> tuple[Checkpoint | None, list[str]]:
    """Newest checkpoint of which every process has its layers intact, and the problems found with newer ones.

    Returns None if no process has a checkpoint. Collective call. Raises UserError if only some processes have one, or
    if the checkpoints come from different runs.
    """
    newest, problems = folder.newest_complete(layers, optional_layers=optional_layers)
    step = -1 if newest is None else newest.manifest.step
    steps = [
        int(n)
        for n in collectives.all_reduce_sum([step if r == collectives.rank else 0 for r in range(collectives.size)])
    ]
    if max(steps) < 0:
        return None, problems
    if min(steps) < 0:
        without = ", ".join(str(rank) for rank, step in enumerate(steps) if step < 0)
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(
            f"process {without} has no whole checkpoint in its folder, others have one of step {max(steps)}: copy the "
            f"missing files of checkpoints/{step_folder(max(steps))} there, from the machines that have them{reasons}"
        )
    if newest is None or step != min(steps):
        problems = [*problems, f"not every process has step {step}"]
        newest = folder.open(min(steps), layers, optional_layers=optional_layers)
    names = hashlib.sha256(msgspec.json.encode(newest.manifest.files)).digest()
    if len(set(collectives.all_gather_bytes(names))) > 1:
        raise UserError(
            f"process {collectives.rank} has another step {min(steps)} in {newest.path} than others: they come from "
            "different runs; keep the folders of one"
        )
    return newest, problems
