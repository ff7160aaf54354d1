"""One checkpoint from all processes of a run, into one folder that they share or one on each machine.

Every process writes its own layers; the manifest names the files of all with their hashes. A folder that has all of
them is a whole checkpoint, whoever wrote them.
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
from thinpipe.checkpoint.folder import FileEntry, step_folder
from thinpipe.core.errors import UserError
from thinpipe.transport.star import Exchange


class Saver:
    def __init__(
        self,
        folder: CheckpointFolder,
        exchange: Exchange,
        *,
        keep_latest: int,
        needed: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        """`needed`: older checkpoints that somebody still reads."""
        self.folder, self.exchange, self.keep_latest, self.needed = folder, exchange, keep_latest, needed
        self.leads = leads(folder.folder.parent, exchange)

    def save(self, manifest: Manifest, layers: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
        """Raises OSError in every process when one of them could not write, or has something that is not finite: to go
        on from that would be of no use.

        Nothing of it is left then, unless another machine had its folder in place already: `agree` passes over that.
        """
        step, files, problem = manifest.step, dict[str, FileEntry](), _not_finite(layers)
        try:
            if self.leads:
                self.folder.begin(step)
        except OSError as error:
            problem = str(error)
        self._go_on(step, problem)
        try:
            files = self.folder.write(step, layers)
        except OSError as error:
            problem = str(error)
        self._go_on(step, problem)
        for told in self.exchange.gather(msgspec.json.encode(files)):
            files |= msgspec.json.decode(told, type=dict[str, FileEntry])
        files = dict(sorted(files.items()))
        try:
            if self.leads:
                self.folder.commit(manifest, files)
        except OSError as error:
            problem = str(error)
        self._go_on(step, problem)
        if self.leads:
            with suppress(OSError):  # what could not be removed now will be next time; this save is done
                self.folder.keep_latest(self.keep_latest, besides=self.needed())
        return self.folder.committed(manifest, files)

    def _go_on(self, step: int, problem: str) -> None:
        """All have come so far, or none goes on."""
        problems = [told.decode() for told in self.exchange.gather(problem.encode())]
        for rank, told in enumerate(problems):
            if told:
                if self.leads:
                    self.folder.abandon(step)
                raise OSError(told if self.exchange.size == 1 else f"process {rank}: {told}")


def _not_finite(layers: Mapping[str, Mapping[str, Tensor]]) -> str:
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return f"{name} of {layer} is not finite"
    return ""


def leads(folder: Path, exchange: Exchange) -> bool:
    """One process for every folder, be it shared or not: the first to make a file there."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".lead-{exchange.spread(secrets.token_hex(8).encode()).decode()}"
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        first = True
    except FileExistsError:
        first = False
    exchange.sum([0.0])  # until all have tried
    if first:
        mark.unlink()
    return first


def agree(
    folder: CheckpointFolder, layers: list[str], exchange: Exchange, *, if_saved: Collection[str] = ()
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of which every process has its layers whole, and what is wrong with newer ones."""
    newest, problems = folder.newest_whole(layers, if_saved=if_saved)
    step = -1 if newest is None else newest.manifest.step
    steps = [int(n) for n in exchange.sum([step if r == exchange.rank else 0 for r in range(exchange.size)])]
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
        newest = folder.open(min(steps), layers, if_saved=if_saved)
    names = hashlib.sha256(msgspec.json.encode(newest.manifest.files)).digest()
    if len(set(exchange.gather(names))) > 1:
        raise UserError(
            f"process {exchange.rank} has another step {min(steps)} in {newest.path} than others: they come from "
            "different runs; keep the folders of one"
        )
    return newest, problems
