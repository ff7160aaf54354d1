"""Checkpoints on disk: written under a temporary name, flushed, renamed; only a whole one is ever opened.

A folder `step-00000200` holds one safetensors file per layer and `manifest.json` with the sha256 of each. A kill or a
full disk at any moment leaves the older checkpoints as they were.
"""

import hashlib
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256, sync_file, sync_folder, write_atomically

FORMAT_VERSION = 2
MANIFEST, _SUFFIX = "manifest.json", ".safetensors"
_PARTIAL = ".partial-"
_LAYER_FILE = re.compile(r"[a-z0-9][a-z0-9.]{0,99}\.safetensors", re.ASCII)
_REPLACED = f"{_PARTIAL}replaced-"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nbytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint says about itself beside its tensors."""

    step: int
    samples_seen: int
    """The cursor of the data."""
    data_sha256: str
    """The tokens that the cursor counts; empty before any training."""
    run: str
    """The resolved settings of the run, as TOML."""
    family: str
    model: dict[str, Any]
    """The model's configuration."""
    basis_version: int | None
    basis_sha256: str | None
    versions: dict[str, str]
    files: dict[str, FileEntry] = {}
    format_version: int = FORMAT_VERSION
    sha256: str = ""
    """Of all the fields above."""

    def sealed(self) -> "Manifest":
        unsealed = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(self, sha256=hashlib.sha256(msgspec.json.encode(unsealed)).hexdigest())


class _Header(msgspec.Struct):
    """What every format, also a later one, has in its manifest."""

    format_version: int
    versions: dict[str, str]


class Checkpoint:
    """A whole checkpoint. Tensors are read layer by layer, so nobody needs to hold more than a part."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    def layer(self, name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(self.path / layer_file(name))
        return tensors

    def has(self, layer: str) -> bool:
        return layer_file(layer) in self.manifest.files

    @classmethod
    def open(cls, path: Path, layers: Collection[str] | None = None, *, if_saved: Collection[str] = ()) -> "Checkpoint":
        """Checks that everything, or these layers, are there bit for bit; raises UserError with the first fault.

        Layers `if_saved` need not be in the manifest, but must be whole if they are.
        """
        manifest = _read_manifest(path)
        if manifest != manifest.sealed():
            raise UserError(f"{path / MANIFEST} has changed since it was written: its own sha256 differs")
        wanted = list(manifest.files) if layers is None else [layer_file(layer) for layer in layers]
        wanted += [name for name in map(layer_file, if_saved) if name in manifest.files]
        for name in dict.fromkeys(wanted):
            file, entry = path / name, manifest.files.get(name)
            if entry is None:
                raise UserError(f"{path} has no {name}: it was saved from another model")
            if not file.is_file() or file.stat().st_size != entry.nbytes:
                raise UserError(f"{file} is missing or cut short")
            if file_sha256(file) != entry.sha256:
                raise UserError(f"{file} has changed since it was written: its sha256 differs from the manifest")
        return cls(path, manifest)


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, manifest: Manifest, layers: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
        """Returns once the checkpoint would survive a power cut. On any error nothing of it is left."""
        try:
            self.begin(manifest.step)
            return self.commit(manifest, self.write(manifest.step, layers))
        except BaseException:
            self.abandon(manifest.step)
            raise

    # The three parts of a save, for processes that write one checkpoint together

    def begin(self, step: int) -> None:
        """Done once, before anyone writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        self.recover()
        self._remove_partial()
        self.partial(step).mkdir()

    def write(self, step: int, layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileEntry]:
        """Some layers, by any number of processes at once. Returns what the manifest has to say of them."""
        partial = self.partial(step)
        return {layer_file(layer): _write_layer(partial, layer, tensors) for layer, tensors in layers.items()}

    def commit(self, manifest: Manifest, files: Mapping[str, FileEntry]) -> Checkpoint:
        """Done once, after everyone has written: from here on the checkpoint exists."""
        partial, final = self.partial(manifest.step), self._final(manifest.step)
        manifest = msgspec.structs.replace(manifest, files=dict(files)).sealed()
        write_atomically(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        if final.exists():
            final.rename(self.folder / f"{_REPLACED}{final.name}")
        partial.rename(final)
        sync_folder(self.folder)
        self._remove_partial()
        return Checkpoint(final, manifest)

    def committed(self, manifest: Manifest, files: Mapping[str, FileEntry]) -> Checkpoint:
        """What `commit` returned to whoever called it."""
        return Checkpoint(self._final(manifest.step), msgspec.structs.replace(manifest, files=dict(files)).sealed())

    def abandon(self, step: int) -> None:
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _final(self, step: int) -> Path:
        return self.folder / step_folder(step)

    def partial(self, step: int) -> Path:
        """Where the files of a checkpoint are until it is committed."""
        return self.folder / f"{_PARTIAL}{self._final(step).name}"

    def open(self, step: int, layers: Collection[str] | None = None, *, if_saved: Collection[str] = ()) -> Checkpoint:
        return Checkpoint.open(self._final(step), layers, if_saved=if_saved)

    def newest_whole(
        self, layers: Collection[str] | None = None, *, if_saved: Collection[str] = (), below: int | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint, of a step `below` this one, that is whole or has these layers whole; and what is wrong
        with newer ones."""
        self.recover()
        problems: list[str] = []
        for path in self._paths():
            if below is not None and path.name >= step_folder(below):
                continue
            try:
                return Checkpoint.open(path, layers, if_saved=if_saved), problems
            except UserError as error:
                problems.append(str(error))
        return None, problems

    def keep_latest(self, count: int, *, besides: Collection[Path] = ()) -> None:
        """Removes all but the newest `count`, and but those `besides`; 0 keeps all."""
        for path in self._paths()[count:] if count else []:
            if path in besides:
                continue
            # Without its manifest a folder is no checkpoint, so a kill in the middle leaves nothing half-valid.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), reverse=True)

    def recover(self) -> None:
        """Puts back a checkpoint that was being replaced when the process was killed between two renames."""
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            original = self.folder / replaced.name.removeprefix(_REPLACED)
            if not original.exists():
                with suppress(FileNotFoundError):  # another process of the run did it
                    replaced.rename(original)

    def _remove_partial(self) -> None:
        for leftover in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # somebody may write there still; the next one removes it


def _read_manifest(path: Path) -> Manifest:
    try:
        data = (path / MANIFEST).read_bytes()
        header = msgspec.json.decode(data, type=_Header)
        if header.format_version != FORMAT_VERSION:
            raise UserError(
                f"{path} has checkpoint format {header.format_version}, this version of thinpipe reads "
                f"{FORMAT_VERSION}: use the version that wrote it ({header.versions.get('thinpipe', 'unknown')})"
            )
        return msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        raise UserError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path / MANIFEST} cannot be read: {error}") from None


def step_folder(step: int) -> str:
    """The name of a checkpoint's folder; they sort by step."""
    return f"step-{step:08d}"


def layer_file(layer: str) -> str:
    return f"{layer}{_SUFFIX}"


def is_layer_file(name: str) -> bool:
    """And nothing that leads elsewhere."""
    return _LAYER_FILE.fullmatch(name) is not None


def layer_of(file: str) -> str:
    return file.removesuffix(_SUFFIX)


def _write_layer(folder: Path, layer: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    path = folder / layer_file(layer)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # how its writer reports a full disk
        raise OSError(str(error)) from error
    sync_file(path)
    return FileEntry(nbytes=path.stat().st_size, sha256=file_sha256(path))
