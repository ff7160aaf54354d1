"""Key pairs of the people and programs that talk to the broker: nkeys, NATS' text form of Ed25519.

A seed (`SU...`) is secret and never leaves its machine; the public key (`U...`) is what the broker is told.
"""

import base64
import binascii
import re
import secrets
from dataclasses import dataclass, field
from typing import Self

from thinpipe.core.errors import UserError

_USER = 20 << 3
"""The first byte of a user's public key; it makes the text start with U."""
_PUBLIC_KEY = re.compile(r"U[A-Z2-7]{55}", re.ASCII)


@dataclass(frozen=True)
class KeyPair:
    seed: str = field(repr=False)
    public_key: str

    @classmethod
    def new(cls) -> Self:
        import nkeys  # type: ignore[import-untyped]

        return cls.from_seed(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode())

    @classmethod
    def from_seed(cls, seed: str) -> Self:
        import nkeys

        try:
            public_key = nkeys.from_seed(bytearray(seed, "ascii")).public_key.decode()
        except (nkeys.NkeysError, ValueError, IndexError):
            public_key = ""
        if not is_public_key(public_key):
            raise UserError(
                "this is not the seed of a user's key, which is 58 letters and digits from SU on: copy it whole"
            )
        return cls(seed, public_key)


def is_public_key(text: str) -> bool:
    """Whether text that a stranger sent is a user's public key: the alphabet, the length, the kind and the checksum."""
    if not _PUBLIC_KEY.fullmatch(text):
        return False
    raw = base64.b32decode(text)
    return raw[0] == _USER and binascii.crc_hqx(raw[:-2], 0) == int.from_bytes(raw[-2:], "little")
