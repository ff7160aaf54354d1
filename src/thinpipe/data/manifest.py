"""Manifest of a folder of token shards: schema, validation, reading and writing. Reads no tokens."""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from thinpipe.config.data import TrainOn
from thinpipe.core.errors import DECODE_ERRORS, DataError

FORMAT_VERSION = 1
CHAT_FORMAT_VERSION = 2
"""Of folders whose tokens have flags, which older programs would take for ids."""
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


class ChatFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How chats became tokens with flags (`core.token_flags`). A document of such a folder is a chat."""

    template_sha256: _Sha256
    train_on: TrainOn
    trained_tokens: _Positive
    longest_chat: _Positive
    """Tokens of the longest chat."""


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
    chat: ChatFacts | msgspec.UnsetType = msgspec.UNSET
    """Of chats only: then the two upper bits of each token are flags."""

    def __post_init__(self) -> None:
        expected = CHAT_FORMAT_VERSION if self.is_chat else FORMAT_VERSION
        if self.format_version != expected or (self.is_chat and self.dtype != "uint32"):
            raise ValueError(f"format version {self.format_version} with tokens of {self.dtype}, chats: {self.is_chat}")

    @property
    def is_chat(self) -> bool:
        return self.chat is not msgspec.UNSET

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
        facts: list[object] = [self.dtype, self.vocabulary, [(shard.tokens, shard.sha256) for shard in self.shards]]
        if self.chat is not msgspec.UNSET:
            facts.append([self.chat.template_sha256, self.chat.train_on])
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
        if version not in (FORMAT_VERSION, CHAT_FORMAT_VERSION):
            raise DataError(
                f"{path} has format version {version}, and this thinpipe reads versions {FORMAT_VERSION} and "
                f"{CHAT_FORMAT_VERSION}: "
                "prepare the tokens again, or use the thinpipe that wrote them"
            )
        return msgspec.json.decode(data, type=Manifest)
    except DECODE_ERRORS as error:
        raise DataError(f"{path} is damaged ({error}): copy it again, or prepare the tokens again") from error
