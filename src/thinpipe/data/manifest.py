"""What a folder of token shards says about itself, and the checks that a manifest file must pass. Reads no tokens."""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from thinpipe.data.errors import DataError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which ids there are, and which tokenizer gives them their meaning."""

    size: _Positive
    """One more than the largest id: the rows that an embedding needs."""
    end_of_text_id: _Natural
    tokenizer_sha256: _Sha256

    def __post_init__(self) -> None:
        if self.end_of_text_id >= self.size:
            raise ValueError(f"end_of_text_id {self.end_of_text_id} is not in a vocabulary of {self.size}")


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # The pattern keeps a manifest from somewhere else from naming a file outside its folder.
    file: Annotated[str, msgspec.Meta(pattern=r"^shard-[0-9]{5,}\.bin$")]
    tokens: _Positive
    sha256: _Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about the tokens but the tokens. Written last: a folder without one is unfinished."""

    format_version: int = FORMAT_VERSION
    dtype: Literal["uint16", "uint32"]
    """Of the ids in the shard files, little-endian, nothing else in the files."""
    vocabulary: Vocabulary
    documents: _Positive
    text_nbytes: _Positive
    """UTF-8 bytes of the text, without the end-of-text tokens."""
    source: str
    """Where the text came from, as it was given."""
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(min_length=1)]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def itemsize_nbytes(self) -> int:
        return 2 if self.dtype == "uint16" else 4

    @property
    def text_bytes_per_token(self) -> float:
        return self.text_nbytes / self.tokens

    def bits_per_byte(self, loss_nats: float) -> float:
        """A mean loss per token as bits per byte of text: comparable between tokenizers."""
        return loss_nats / math.log(2) / self.text_bytes_per_token

    @property
    def content_sha256(self) -> str:
        """A name for the ids and their meaning: what a checkpoint keeps and peers compare."""
        facts = [self.dtype, self.vocabulary, [(shard.tokens, shard.sha256) for shard in self.shards]]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


class _Version(msgspec.Struct):
    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no finished tokens ({MANIFEST_NAME} is missing): make them with `thinpipe tokenize "
            f"--output {folder.parent}`, again if that was interrupted"
        ) from None
    try:
        # The version first: the other fields may have another meaning in another version.
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, and this thinpipe reads version {FORMAT_VERSION}: "
                "prepare the tokens again, or use the thinpipe that wrote them"
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged ({error}): copy it again, or prepare the tokens again") from error
