"""Ed25519 key pairs of hub, peers and invites, in the text encoding of NATS (nkeys).

A seed (`SU...` of a user's key) is secret and stays on its machine, except the seed of an invite; the public key
(`U...`) is what others know of it. The hub also has keys of an operator (`SO...`, `O...`) and of accounts (`SA...`,
`A...`), with which it signs JWTs (`protocol.jwt`).
"""

import base64
import binascii
import re
import secrets
from dataclasses import dataclass, field
from typing import Literal, Self

from thinpipe.core.errors import UserError

Kind = Literal["operator", "account", "user"]
_FIRST_BYTES: dict[Kind, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
"""First byte of a public key by its kind; makes its text start with O, A or U."""
_PUBLIC_KEY = re.compile(r"[AOU][A-Z2-7]{55}", re.ASCII)


@dataclass(frozen=True)
class KeyPair:
    """A seed and its public key."""

    seed: str = field(repr=False)
    public_key: str

    @classmethod
    def new(cls, kind: Kind = "user") -> Self:
        import nkeys  # type: ignore[import-untyped]

        return cls.from_seed(nkeys.encode_seed(secrets.token_bytes(32), _FIRST_BYTES[kind]).decode(), kind)

    @classmethod
    def from_seed(cls, seed: str, kind: Kind = "user") -> Self:
        """Raises UserError if the text is not the seed of a key of this kind."""
        import nkeys

        try:
            public_key = nkeys.from_seed(bytearray(seed, "ascii")).public_key.decode()
        except (nkeys.NkeysError, ValueError, IndexError):
            public_key = ""
        if not is_public_key(public_key, kind):
            raise UserError(
                f"this is not the seed of a key of kind {kind!r} (58 letters and digits that begin with "
                f"S{kind[0].upper()}): copy all of it"
            )
        return cls(seed, public_key)

    def sign(self, data: bytes) -> bytes:
        """Signature of the data with this key (Ed25519, 64 bytes)."""
        import nkeys

        signature: bytes = nkeys.from_seed(bytearray(self.seed, "ascii")).sign(data)
        return signature


def is_public_key(text: str, kind: Kind = "user") -> bool:
    """True if untrusted text is a public key of this kind: alphabet, length, key type and checksum are right."""
    if not _PUBLIC_KEY.fullmatch(text):
        return False
    raw = base64.b32decode(text)
    return raw[0] == _FIRST_BYTES[kind] and binascii.crc_hqx(raw[:-2], 0) == int.from_bytes(raw[-2:], "little")


def raw_public_key(public_key: str) -> bytes:
    """The 32 bytes of a public key (see `is_public_key`)."""
    return base64.b32decode(public_key)[1:-2]


def public_key_of(raw: bytes, kind: Kind) -> str:
    """The text of a public key of 32 bytes."""
    body = bytes([_FIRST_BYTES[kind]]) + raw
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode()


def is_signed_by(public_key: str, data: bytes, signature: bytes) -> bool:
    """True if the signature of the data was made with the seed of this public key (see `is_public_key`)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(raw_public_key(public_key)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
