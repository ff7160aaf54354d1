"""Checkpoints on disk: written to a temporary folder by one or several processes, flushed to disk, then renamed.
Opening a checkpoint verifies the sha256 of the layers asked for.

A folder `step-00000200` holds one safetensors file per checkpoint layer and `manifest.json` with the sha256 of each.
Checkpoint layers are the model's layers with their optimizer state (`first`, `blocks.N`, `projections.N`, `last`), the
state of the run (`run`) and of codecs (`boundary.N.sender`); their tensors are chosen in state.py and codec_state.py. A
kill or a full disk at any moment leaves older checkpoints intact.
"""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinpipe.config.huggingface_model import HUGGINGFACE
from thinpipe.core.bounds import (
    MAX_FILES,
    Count,
    LayerFileName,
    Nbytes,
    Sha256,
    Text,
    Toml,
    Word,
)
from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import file_sha256, replace, sync_file, sync_folder, write_atomically
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.core.run_folder import MANIFEST, step_folder, step_folders

FORMAT_VERSION = 3
_SUFFIX = ".safetensors"
_PARTIAL = ".partial-"
_REPLACED = f"{_PARTIAL}replaced-"
"""Prefix of an older checkpoint of the same step while `commit` replaces it."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hash of a layer file in the manifest."""

    nbytes: Nbytes
    sha256: Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a checkpoint."""

    step: Count
    """Number of finished steps."""
    samples_seen: Count
    """Data cursor: number of training samples used so far."""
    data_sha256: Word
    """Hash of the tokens that the data cursor refers to; empty before any training."""
    run: Toml
    """Resolved settings of the run, as TOML."""
    family: Word
    """Model family, such as "llama"."""
    model: Annotated[dict[Word, Any], msgspec.Meta(max_length=1000)]
    """Model configuration."""
    basis_version: Count | None
    basis_sha256: Word | None
    versions: Annotated[dict[Text, Text], msgspec.Meta(max_length=100)]
    """Versions of the software that wrote the checkpoint."""
    files: Annotated[dict[LayerFileName, FileEntry], msgspec.Meta(max_length=MAX_FILES)] = {}
    """Layer files by name."""
    rounds: Count | msgspec.UnsetType = msgspec.UNSET
    """Number of merged rounds of replicas; unset in runs without rounds, and by earlier versions."""
    format_version: Count = FORMAT_VERSION
    sha256: Sha256 = ""
    """Hash of all the fields above."""

    @property
    def is_base(self) -> bool:
        """Whether this is the beginning of a run on a Hugging Face model: its weights are those of the base, which has
        files of its own, and of adapters that follow from the seed. It may have no files of layers."""
        return self.step == 0 and self.family == HUGGINGFACE

    def with_checksum(self) -> "Manifest":
        """Copy with the field `sha256` computed."""
        without_checksum = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(self, sha256=hashlib.sha256(msgspec.json.encode(without_checksum)).hexdigest())


class _Header(msgspec.Struct):
    """Manifest fields that all format versions share, also future ones."""

    format_version: int
    versions: dict[str, str]


class Checkpoint:
    """A committed checkpoint; `open` verifies it, the constructor does not. Tensors are loaded one layer at a time, so
    a process loads only its own layers."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    def layer(self, name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(self.path / layer_file(name))
        return tensors

    def has(self, layer: str) -> bool:
        return layer_file(layer) in self.manifest.files

    @classmethod
    def open(
        cls, path: Path, layers: Collection[str] | None = None, *, optional_layers: Collection[str] = ()
    ) -> "Checkpoint":
        """Opens a checkpoint; verifies size and hash of `layers` (None: all). Raises UserError on the first fault.

        `optional_layers` may be absent from the manifest, but must be intact if present.
        """
        manifest = _read_manifest(path)
        if manifest != manifest.with_checksum():
            raise UserError(f"{path / MANIFEST} has changed since it was written: its own sha256 differs")
        wanted = list(manifest.files) if layers is None else [layer_file(layer) for layer in layers]
        wanted += [name for name in map(layer_file, optional_layers) if name in manifest.files]
        for name in dict.fromkeys(wanted):
            file, entry = path / name, manifest.files.get(name)
            if entry is None and manifest.is_base:
                continue
            if entry is None:
                raise UserError(f"{path} has no {name}: it was saved from another model")
            if not file.is_file() or file.stat().st_size != entry.nbytes:
                raise UserError(f"{file} is missing or cut short")
            if file_sha256(file) != entry.sha256:
                raise UserError(f"{file} has changed since it was written: its sha256 differs from the manifest")
        return cls(path, manifest)


class CheckpointFolder:
    """Folder with all checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, manifest: Manifest, layers: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
        """Saves a checkpoint from a single process; durable on return. On any error the partial one is removed."""
        try:
            self.begin(manifest.step)
            return self.commit(manifest, self.write(manifest.step, layers))
        except BaseException:
            self.discard(manifest.step)
            raise

    # The three phases of a save, for several processes that write one checkpoint together

    def begin(self, step: int) -> None:
        """First phase, in one process, before any process writes: creates the partial folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        self.recover()
        self._remove_partial()
        self.partial(step).mkdir()

    def write(self, step: int, layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileEntry]:
        """Second phase, in any number of processes at once: writes layers. Returns their manifest entries."""
        partial = self.partial(step)
        return {layer_file(layer): _write_layer(partial, layer, tensors) for layer, tensors in layers.items()}

    def commit(self, manifest: Manifest, files: Mapping[str, FileEntry]) -> Checkpoint:
        """Third phase, in one process, after all have written: writes the manifest and renames the partial folder.

        `files`: entries of the layers of all processes.
        """
        partial, final = self.partial(manifest.step), self._final(manifest.step)
        manifest = msgspec.structs.replace(manifest, files=dict(files)).with_checksum()
        write_atomically(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        if final.exists():
            replace(final, self.folder / f"{_REPLACED}{final.name}")
        replace(partial, final)
        sync_folder(self.folder)
        self._remove_partial()
        return Checkpoint(final, manifest)

    def committed(self, manifest: Manifest, files: Mapping[str, FileEntry]) -> Checkpoint:
        """The checkpoint as `commit` returns it, without reading the disk: for processes that did not call `commit`."""
        return Checkpoint(
            self._final(manifest.step), msgspec.structs.replace(manifest, files=dict(files)).with_checksum()
        )

    def discard(self, step: int) -> None:
        """Removes the partial checkpoint of this step, if any."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _final(self, step: int) -> Path:
        return self.folder / step_folder(step)

    def partial(self, step: int) -> Path:
        """Temporary folder of a checkpoint until it is committed."""
        return self.folder / f"{_PARTIAL}{self._final(step).name}"

    def open(
        self, step: int, layers: Collection[str] | None = None, *, optional_layers: Collection[str] = ()
    ) -> Checkpoint:
        return Checkpoint.open(self._final(step), layers, optional_layers=optional_layers)

    def newest_complete(
        self, layers: Collection[str] | None = None, *, optional_layers: Collection[str] = (), below: int | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Newest checkpoint whose `layers` (None: all) are intact, and the problems found with newer ones.

        `below`: consider only steps below this one.
        """
        self.recover()
        problems: list[str] = []
        for path in step_folders(self.folder):
            if below is not None and path.name >= step_folder(below):
                continue
            try:
                return Checkpoint.open(path, layers, optional_layers=optional_layers), problems
            except UserError as error:
                problems.append(str(error))
        return None, problems

    def keep_latest(self, count: int, *, exempt: Collection[Path] = ()) -> None:
        """Deletes all checkpoints except the newest `count` and those in `exempt`; count 0 deletes none."""
        for path in step_folders(self.folder)[count:] if count else []:
            if path in exempt:
                continue
            # Manifest first: a folder without one is no checkpoint, so a kill in between leaves nothing half-valid.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)

    def recover(self) -> None:
        """Restores a checkpoint whose replacement was interrupted by a kill between the two renames of `commit`."""
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            original = self.folder / replaced.name.removeprefix(_REPLACED)
            if not original.exists():
                with suppress(FileNotFoundError):  # another process of the run was faster
                    replace(replaced, original)

    def _remove_partial(self) -> None:
        for leftover in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # a process may still write there: the next save retries


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
    except (OSError, *DECODE_ERRORS) as error:
        raise UserError(f"{path / MANIFEST} cannot be read: {error}") from None


def received_manifest(data: bytes) -> Manifest:
    """The manifest in JSON of another machine. Raises ProtocolError if it is not valid, or its own hash is wrong."""
    manifest: Manifest = decode_foreign(data, Manifest, form="json")
    if manifest.format_version != FORMAT_VERSION or manifest != manifest.with_checksum():
        raise ProtocolError("a manifest of another version, or with a wrong checksum")
    return manifest


def layer_file(layer: str) -> str:
    return f"{layer}{_SUFFIX}"


def layer_of(file: str) -> str:
    return file.removesuffix(_SUFFIX)


def _write_layer(folder: Path, layer: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    path = folder / layer_file(layer)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # raised by safetensors on a full disk
        raise OSError(str(error)) from error
    sync_file(path)
    return FileEntry(nbytes=path.stat().st_size, sha256=file_sha256(path))
