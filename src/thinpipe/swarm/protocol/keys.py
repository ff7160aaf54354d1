"""Ed25519 key pairs for the broker, in the text encoding of NATS (nkeys).

A seed (`SU...`) is secret and stays on its machine, except the seed of an invite's single-use key; the public key
(`U...`) is registered with the broker.
"""

import base64
import binascii
import re
import secrets
from dataclasses import dataclass, field
from typing import Self

from thinpipe.core.errors import UserError

_USER = 20 << 3
"""First byte of a user's public key; makes its text start with U."""
_PUBLIC_KEY = re.compile(r"U[A-Z2-7]{55}", re.ASCII)


@dataclass(frozen=True)
class KeyPair:
    """A seed and its public key."""

    seed: str = field(repr=False)
    public_key: str

    @classmethod
    def new(cls) -> Self:
        import nkeys  # type: ignore[import-untyped]

        return cls.from_seed(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode())

    @classmethod
    def from_seed(cls, seed: str) -> Self:
        """Raises UserError if the text is not the seed of a user's key."""
        import nkeys

        try:
            public_key = nkeys.from_seed(bytearray(seed, "ascii")).public_key.decode()
        except (nkeys.NkeysError, ValueError, IndexError):
            public_key = ""
        if not is_public_key(public_key):
            raise UserError(
                "this is not the seed of a user's key (58 letters and digits that begin with SU): copy all of it"
            )
        return cls(seed, public_key)

    def sign(self, data: bytes) -> bytes:
        """Signature of the data with this key (Ed25519, 64 bytes)."""
        import nkeys

        signature: bytes = nkeys.from_seed(bytearray(self.seed, "ascii")).sign(data)
        return signature


def is_public_key(text: str) -> bool:
    """True if untrusted text is a user's public key: alphabet, length, key type and checksum are right."""
    if not _PUBLIC_KEY.fullmatch(text):
        return False
    raw = base64.b32decode(text)
    return raw[0] == _USER and binascii.crc_hqx(raw[:-2], 0) == int.from_bytes(raw[-2:], "little")


def is_signed_by(public_key: str, data: bytes, signature: bytes) -> bool:
    """True if the signature of the data was made with the seed of this public key (see `is_public_key`)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        raw = base64.b32decode(public_key)[1:-2]
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
