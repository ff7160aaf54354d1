"""Manifest of a folder of token shards: schema, validation, reading and writing. Reads no tokens."""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from thinpipe.core.errors import DECODE_ERRORS, DataError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Range of token ids, and the identity of their tokenizer."""

    size: _Positive
    """Largest token id plus one: the number of embedding rows."""
    end_of_text_id: _Natural
    tokenizer_sha256: _Sha256

    def __post_init__(self) -> None:
        if self.end_of_text_id >= self.size:
            raise ValueError(f"end_of_text_id {self.end_of_text_id} is not in a vocabulary of {self.size}")


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Manifests may be downloaded: the pattern prevents path traversal.
    file: Annotated[str, msgspec.Meta(pattern=r"^shard-[0-9]{5,}\.bin$")]
    tokens: _Positive
    sha256: _Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a folder of token shards. Written last: a folder without a manifest is incomplete."""

    format_version: int = FORMAT_VERSION
    dtype: Literal["uint16", "uint32"]
    """Data type of the token ids in the shard files: raw, little-endian, without a header."""
    vocabulary: Vocabulary
    documents: _Positive
    text_nbytes: _Positive
    """UTF-8 bytes of the text, without the end-of-text tokens."""
    source: str
    """Sources of the text, as the user specified them."""
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
        """Converts a mean loss per token in nats to bits per byte of text, which is comparable between tokenizers."""
        return loss_nats / math.log(2) / self.text_bytes_per_token

    @property
    def content_sha256(self) -> str:
        """Hash of the tokens and of their tokenizer, saved in checkpoints and compared by peers."""
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
        # Check the version first: other fields may differ in another version.
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, and this thinpipe reads version {FORMAT_VERSION}: "
                "prepare the tokens again, or use the thinpipe that wrote them"
            )
        return msgspec.json.decode(data, type=Manifest)
    except DECODE_ERRORS as error:
        raise DataError(f"{path} is damaged ({error}): copy it again, or prepare the tokens again") from error
