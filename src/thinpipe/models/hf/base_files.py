"""The files of the model that a run trains on: in a folder, or on the Hugging Face hub, from which single files are
downloaded into its cache when they are needed.

A base has a hash, of the content of all its tensors by name. Each process hashes the tensors that it reads, so that no
tensor is read for the hash alone, and the hash of the base is made of those of all processes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.core.errors import UserError
from thinpipe.models.hf.weights import INDEX, SINGLE_FILE, StoredTensors

CONFIG = "config.json"


@dataclass(frozen=True)
class HubModel:
    """A model of the Hugging Face hub."""

    name: str
    revision: str | None

    @classmethod
    def of(cls, source: str) -> "HubModel | None":
        """None if the source is a folder."""
        if not source.startswith(HUB_PREFIX):
            return None
        name, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
        return cls(name, revision or None)

    def fetch(self, file: str) -> Path | None:
        """A file in the cache, downloaded unless it is there; None if the model has no such file. Raises UserError."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except LocalEntryNotFoundError as error:  # offline, and not in the cache
            if file != CONFIG and self.fetch(CONFIG) is not None:
                return None
            raise UserError(f"{self} is not in the cache of this machine and cannot be downloaded: {error}") from error
        except EntryNotFoundError:
            return None
        except Exception as error:  # of the library and of its transport: no such model, no rights, no network
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{self} cannot be downloaded: {first}") from error

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.name}" + (f"@{self.revision}" if self.revision else "")


def pinned_source(source: str) -> tuple[str, Path]:
    """The source with the commit that its revision means now, so that all processes and later runs read the same files;
    and the folder that has its config.json. Raises UserError."""
    hub = HubModel.of(source)
    if hub is None:
        return str(Path(source).absolute()), Path(source)
    config = hub.fetch(CONFIG)
    if config is None:
        raise UserError(f"{hub} has no {CONFIG}")
    return str(HubModel(hub.name, config.parent.name)), config.parent


def base_file(source: str, name: str) -> Path | None:
    """A small file of the base, such as tokenizer.json; None if it has none."""
    hub = HubModel.of(source)
    if hub is not None:
        return hub.fetch(name)
    path = Path(source) / name
    return path if path.is_file() else None


class _HubTensors(StoredTensors):
    """Tensors of a model of the Hugging Face hub: a file is downloaded when the first of its tensors is read."""

    def __init__(self, hub: HubModel) -> None:
        self._hub = hub
        found = hub.fetch(INDEX) or hub.fetch(SINGLE_FILE)
        if found is None:
            raise UserError(f"{hub} has neither {INDEX} nor {SINGLE_FILE}: use a model with safetensors files")
        super().__init__(found.parent, "")

    def _open(self, file: str) -> Any:
        if file not in self._opened and Path(file).name == file:
            self._hub.fetch(file)
        return super()._open(file)


def open_tensors(source: str) -> StoredTensors:
    """The tensors of a base, none of them read. Raises UserError."""
    hub = HubModel.of(source)
    return StoredTensors(Path(source), "") if hub is None else _HubTensors(hub)


class StoredTensor:
    """A tensor of a base, read when it is indexed; its file is not opened before."""

    def __init__(self, stored: StoredTensors, name: str, hashes: dict[str, str]) -> None:
        self._stored, self._name, self._hashes = stored, name, hashes

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self._stored.read(self._name)
        if self._name not in self._hashes:
            self._hashes[self._name] = tensor_sha256(self._name, tensor)
        return tensor[index]


def stored_tensors(source: str, hashes: dict[str, str]) -> dict[str, StoredTensor]:
    """All tensors of a base by name, none of them read; `hashes` gets that of each as it is read. Raises UserError."""
    stored = open_tensors(source)
    return {name: StoredTensor(stored, name, hashes) for name in stored.names}


def tensor_sha256(name: str, tensor: Tensor) -> str:
    """Hash of a tensor's name, data type, shape and content."""
    content = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
    content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def base_sha256(hashes: Iterable[str]) -> str:
    """Hash of a base, from those of its tensors; a tensor that two processes have read counts once."""
    return hashlib.sha256("\n".join(sorted(set(hashes))).encode()).hexdigest()
