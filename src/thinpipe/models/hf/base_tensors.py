"""The tensors of a base by name, each read and hashed when transformers' loader takes it: from a folder, from the
Hugging Face hub's cache, or from the folder in which a peer keeps what its hub has stated of the base.

A peer's folder (`PeerBase`) has the statement, the tensors that were received, named by their hashes, and the name of a
place of the peer's own, a folder or hf:NAME@COMMIT, from which the others come. A tensor that is not the stated one is
refused by name, wherever it came from.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import decode_foreign
from thinpipe.models.hf.base_files import open_source
from thinpipe.models.hf.base_statement import DTYPES, BaseStatement, StatedTensor, content_sha256, tensor_sha256
from thinpipe.models.hf.config import CONFIG
from thinpipe.models.hf.weights import StoredTensors

_STATEMENT, _RECEIVED, _OWN = "base.json", "tensors", "own_source.txt"


class TensorSource(Protocol):
    """Tensors of a base by name."""

    @property
    def names(self) -> list[str]: ...

    def read(self, name: str) -> Tensor:
        """Raises UserError if there is no such tensor, or if its file is damaged."""
        ...

    def nbytes(self, name: str) -> int:
        """Size of a tensor, which is not read."""
        ...


class PeerBase:
    """The folder of a peer with what it has of a base."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.statement_path = folder, folder / _STATEMENT

    def received(self, tensor: StatedTensor) -> Path:
        """File of a received tensor: its content and nothing else."""
        return self.folder / _RECEIVED / tensor.sha256

    def describe(self, config: Mapping[str, Any], own: str) -> None:
        """Writes the model's config.json, and the place of the peer's own from which tensors come (`own_source`)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / CONFIG, json.dumps(config).encode())
        self.use_own(own)

    def use_own(self, source: str) -> None:
        """Tensors that are not received come from this place."""
        write_atomically(self.folder / _OWN, source.encode())

    @property
    def own_source(self) -> str:
        """A folder, or hf:NAME@COMMIT; empty: none."""
        try:
            return (self.folder / _OWN).read_text("utf-8")
        except FileNotFoundError:
            return ""

    def statement(self) -> BaseStatement:
        """What the hub has stated. Raises UserError."""
        try:
            return decode_foreign(self.statement_path.read_bytes(), BaseStatement, form="json")
        except OSError as error:  # ProtocolError is one
            raise UserError(f"{self.statement_path} cannot be read ({error}): remove it, and join again") from error


class _PeerTensors:
    """`TensorSource` of a peer's folder."""

    def __init__(self, base: PeerBase) -> None:
        self._base = base
        self._stated = {tensor.name: tensor for tensor in base.statement().tensors}
        self._opened: StoredTensors | None = None

    @property
    def names(self) -> list[str]:
        return list(self._stated)

    def nbytes(self, name: str) -> int:
        return self._stated[name].nbytes

    def read(self, name: str) -> Tensor:
        stated = self._stated[name]
        path = self._base.received(stated)
        if not path.is_file():
            return self._own.read(name)
        dtype = DTYPES[stated.dtype]
        if not stated.nbytes:
            return torch.empty(stated.shape, dtype=dtype)
        return torch.from_file(str(path), size=stated.nbytes // dtype.itemsize, dtype=dtype).view(stated.shape)

    @property
    def _own(self) -> StoredTensors:
        if self._opened is None:
            self._opened = open_source(self._base.own_source or str(self._base.folder))
        return self._opened

    def refuse_other(self, name: str, tensor: Tensor, content: str) -> None:
        """Raises UserError unless this is the stated tensor."""
        stated = self._stated[name]
        if stated.identity == tensor_sha256(name, tensor, content):
            return
        path = self._base.received(stated)
        where = path if path.is_file() else self._base.own_source
        raise UserError(
            f"{name} in {where} is not that of the hub's base (sha256 {content}, the hub states {stated.sha256}): "
            + (
                "remove the file, and join again"
                if path.is_file()
                else "join with --base and the folder of the same revision, or without it to have the base from the hub"
            )
        )


def open_tensors(source: str) -> TensorSource:
    """The tensors of a base, none of them read. Raises UserError."""
    received = PeerBase(Path(source))
    return _PeerTensors(received) if received.statement_path.is_file() else open_source(source)


class StoredTensor:
    """A tensor of a base, read when it is indexed; its file is not opened before."""

    def __init__(self, stored: TensorSource, name: str, hashes: dict[str, str]) -> None:
        self._stored, self._name, self._hashes = stored, name, hashes

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self._stored.read(self._name)
        if self._name not in self._hashes:
            content = content_sha256(tensor)
            if isinstance(self._stored, _PeerTensors):
                self._stored.refuse_other(self._name, tensor, content)
            self._hashes[self._name] = tensor_sha256(self._name, tensor, content)
        return tensor[index]


def stored_tensors(source: str, hashes: dict[str, str]) -> dict[str, StoredTensor]:
    """All tensors of a base by name, none of them read; `hashes` gets that of each as it is read. Raises UserError."""
    stored = open_tensors(source)
    return {name: StoredTensor(stored, name, hashes) for name in stored.names}
