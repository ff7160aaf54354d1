"""What a base consists of: its tensors with type, shape, hash of the content, and the segments that read them.

A base has a hash, of the content of all its tensors by name. Each process hashes the tensors that it reads, so that no
tensor is read for the hash alone, and the hash of the base is made of those of all processes.

A hub states its base to its peers, who compare each tensor that they read, wherever it came from. The hash of a base
follows from the statement, so that the manifest of a checkpoint, which has that hash, vouches for a statement.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from thinpipe.core.bounds import SegmentIndex, Word
from thinpipe.core.errors import UserError
from thinpipe.core.safetensors_header import TensorPlace, tensor_nbytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors by their names in safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DtypeName = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
ContentSha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_PIECE_NBYTES = 16 << 20


class StatedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a base."""

    name: Word
    """As the base's files call it."""
    dtype: DtypeName
    shape: Annotated[list[_Length], msgspec.Meta(max_length=8)]
    sha256: ContentSha256
    """Of the content, row after row and little-endian, as safetensors stores it."""
    segments: Annotated[list[SegmentIndex], msgspec.Meta(max_length=16)]
    """Segments that read it: the ends of a model may share a table."""

    def __post_init__(self) -> None:
        if self.nbytes > 1 << 50:
            raise ValueError("a tensor larger than any machine")

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, tuple(self.shape))

    @property
    def identity(self) -> str:
        """Hash of name, type, shape and content."""
        return _identity(self.name, self.dtype, self.shape, self.sha256)


class BaseStatement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors of a base that some segment reads."""

    tensors: Annotated[list[StatedTensor], msgspec.Meta(max_length=100_000)]

    @property
    def base_sha256(self) -> str:
        return base_sha256(tensor.identity for tensor in self.tensors)

    def of_segments(self, segments: Collection[int]) -> list[StatedTensor]:
        """The tensors that these segments read."""
        return [tensor for tensor in self.tensors if not set(segments).isdisjoint(tensor.segments)]


def state_base(places: dict[str, TensorPlace], readers: Sequence[Collection[str]]) -> BaseStatement:
    """Reads every tensor that is read by a segment. `places`: the tensors of the base by name; `readers`: the names of
    those that each segment reads. Raises UserError."""
    segments: dict[str, list[int]] = {}
    for index, names in enumerate(readers):
        for name in names:
            segments.setdefault(name, []).append(index)
    tensors = []
    for name in sorted(segments):
        place = places[name]
        if place.dtype not in DTYPES:
            raise UserError(f"{name} in {place.path} is of type {place.dtype}, which is not read: use weights in bf16")
        content = _content_in_file(place)
        tensors.append(StatedTensor(name, place.dtype, list(place.shape), content, segments[name]))  # type: ignore[arg-type]
    return BaseStatement(tensors=tensors)


def content_sha256(tensor: Tensor) -> str:
    """Hash of a tensor's content."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def tensor_sha256(name: str, tensor: Tensor, content: str | None = None) -> str:
    """Hash of a tensor's name, type, shape and content. `content`: hash of the content, if it is known."""
    return _identity(name, _NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.shape, content or content_sha256(tensor))


def base_sha256(hashes: Iterable[str]) -> str:
    """Hash of a base, from those of its tensors; a tensor that two processes have read counts once."""
    return hashlib.sha256("\n".join(sorted(set(hashes))).encode()).hexdigest()


def _identity(name: str, dtype: str, shape: Sequence[int], content: str) -> str:
    return hashlib.sha256(f"{name} {dtype} {list(shape)} {content}".encode()).hexdigest()


def _content_in_file(place: TensorPlace) -> str:
    digest, left = hashlib.sha256(), place.nbytes
    with place.path.open("rb") as file:
        file.seek(place.offset)
        while left:
            piece = file.read(min(left, _PIECE_NBYTES))
            if not piece:
                raise UserError(f"{place.path} is not whole: download it again")
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()
