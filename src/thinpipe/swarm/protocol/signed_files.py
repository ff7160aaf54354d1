"""Files of a checkpoint as their maker announces them: name, size and hash, signed with the maker's own key.

The signature covers the run, the generation and the step too, so that it says who computed these bytes and when, and
holds for no other checkpoint.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from thinpipe.core.bounds import MAX_FILES, GenerationNumber, LayerFileName, Name, Nbytes, Word
from thinpipe.swarm.protocol.keys import KeyPair, is_signed_by

FullSha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
COMMIT_FILE = "commit.json"
"""File in a hub's checkpoint folder with the record of the commit, which peers may fetch."""
_MEANING = "file of a thinpipe checkpoint, version 1"
"""First element of what is signed: a signature for this purpose is none for another."""


class Occasion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The save in which a file was made."""

    run: str
    """Fingerprint of the hub's certificate."""
    generation: int
    step: int


class SignedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a checkpoint."""

    name: LayerFileName
    nbytes: Nbytes
    sha256: FullSha256
    signature: Signature

    def is_signed_by(self, public_key: str, occasion: Occasion) -> bool:
        return is_signed_by(public_key, _signed(occasion, self.name, self.nbytes, self.sha256), self.signature)


class Maker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who made a file of a commit, and the signature that shows it."""

    peer: Name
    public_key: Word
    generation: GenerationNumber
    signature: Signature


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit's record (`COMMIT_FILE`) says of who made its files; the record has more fields."""

    makers: Annotated[dict[LayerFileName, Maker], msgspec.Meta(max_length=MAX_FILES)] = msgspec.field(
        default_factory=dict
    )
    """Maker of each file, by file name; empty in commits of earlier versions."""

    def unproven(self, files: Mapping[str, tuple[int, str]], run: str, step: int) -> list[str]:
        """Those of the files (size and hash by name) that no maker has signed: each with the name of the alleged
        maker."""
        found = []
        for name, (nbytes, sha256) in files.items():
            maker = self.makers.get(name)
            if maker is None:
                found.append(f"{name} (no maker)")
                continue
            signed = _signed(Occasion(run=run, generation=maker.generation, step=step), name, nbytes, sha256)
            if not is_signed_by(maker.public_key, signed, maker.signature):
                found.append(f"{name} ({maker.peer})")
        return found


def sign_file(key: KeyPair, occasion: Occasion, name: str, nbytes: int, sha256: str) -> SignedFile:
    signature = key.sign(_signed(occasion, name, nbytes, sha256))
    return SignedFile(name=name, nbytes=nbytes, sha256=sha256, signature=signature)


def first_unsigned(files: Iterable[SignedFile], public_key: str, occasion: Occasion) -> str:
    """Name of the first file whose signature was not made with this key for this occasion; empty if there is none."""
    return next((file.name for file in files if not file.is_signed_by(public_key, occasion)), "")


def _signed(occasion: Occasion, name: str, nbytes: int, sha256: str) -> bytes:
    return msgspec.json.encode([_MEANING, occasion.run, occasion.generation, occasion.step, name, nbytes, sha256])
