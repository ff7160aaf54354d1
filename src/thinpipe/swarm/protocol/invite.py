"""Invite: one line of text with which one person can join a run once.

It contains the broker's URL, the fingerprint of its certificate, the seed of a key of its own and what the hub has
signed for that key: a JWT that lets it ask to join. To keep the line short, the JWT's text is left out and put together
again.
"""

import base64
import binascii
import re
from typing import Annotated, Self

import msgspec

from thinpipe.core.bounds import Count, Name, Text, Word
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.protocol.jwt import jwt_from_signature, user_claims
from thinpipe.swarm.protocol.keys import KeyPair, is_public_key, public_key_of, raw_public_key
from thinpipe.swarm.protocol.names import check_name
from thinpipe.transport.nats.client import Credentials

_PREFIX = "thinpipe3:"
"""The number is increased when hub and peer of different versions cannot decode each other's messages, or would put
together other JWTs."""
_ANY_PREFIX = re.compile(r"thinpipe\d+:")
MAX_CHARACTERS = 1024
GRACE_SECONDS = 30 * 86400
"""Seconds after its end in which the server still lets an invite sign in, so that the hub can say that it has ended."""
_LATEST = 10**11
_Bytes = Annotated[bytes, msgspec.Meta(max_length=64)]


class PackedInvite(msgspec.Struct, array_like=True):
    """Encoding of an invite in the line; positional and binary, because people copy the line."""

    url: Word
    run: Text
    fingerprint: _Bytes
    id: Name
    seed: _Bytes
    account: _Bytes
    issuer: _Bytes
    expires: Count
    signature: _Bytes


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded invite. Its line is a bearer credential: anyone who has it can join, so it is sent like a password."""

    url: str
    """URL of the broker."""
    run: str
    """Name of the run."""
    fingerprint: str
    """sha256 fingerprint of the broker's certificate, which authenticates the hub."""
    id: str
    """Id of the invite, used in the broker's subjects."""
    seed: str
    """Seed of the invite's key."""
    account: str
    """Public key of the account of hub and peers."""
    issuer: str
    """Public key with which the hub signs invites."""
    expires: int
    """When it ends, in seconds since 1970 of the hub's clock."""
    signature: bytes
    """The hub's signature of the JWT of this key."""

    @property
    def credentials(self) -> Credentials:
        """Of the invite's key, which may ask to join."""
        public_key = KeyPair.from_seed(self.seed).public_key
        claims = user_claims(self.id, public_key, self.account, expires=self.expires + GRACE_SECONDS)
        return Credentials(seed=self.seed, jwt=jwt_from_signature({**claims, "iss": self.issuer}, self.signature))

    @staticmethod
    def is_invite(text: str) -> bool:
        """True if the text starts like an invite, of any version."""
        return _ANY_PREFIX.match(text.strip()) is not None

    @classmethod
    def read(cls, line: str) -> Self:
        """Decodes the line. Raises UserError saying what is wrong if it is truncated, mistyped or of another
        version."""
        line = "".join(line.split())  # mail programs break lines
        if (other := _ANY_PREFIX.match(line)) and other[0] != _PREFIX:
            raise UserError(
                f"this invite begins with {other[0]!r}, and this version of thinpipe reads {_PREFIX!r}: install the "
                "hub's version of thinpipe, or ask its owner to upgrade the hub and to send a new invite"
            )
        if not line.startswith(_PREFIX):
            raise UserError(f"an invite begins with {_PREFIX!r}: copy the whole line that `thinpipe hub` printed")
        if len(line) > MAX_CHARACTERS:
            raise UserError("this invite is too long: copy only the line that `thinpipe hub` printed")
        try:
            text = line.removeprefix(_PREFIX)
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            body, checksum = data[:-4], data[-4:]
            if binascii.crc32(body).to_bytes(4) != checksum or _as_text(data) != text:
                raise ValueError
            packed = decode_foreign(body, PackedInvite)
            invite = cls(
                url=packed.url,
                run=packed.run,
                fingerprint=packed.fingerprint.hex(),
                id=packed.id,
                seed=base64.b32encode(packed.seed).decode().rstrip("="),
                account=public_key_of(packed.account, "account"),
                issuer=public_key_of(packed.issuer, "account"),
                expires=packed.expires,
                signature=packed.signature,
            )
            KeyPair.from_seed(invite.seed)
            check_name(invite.id)  # it becomes the name of a folder
            if (
                not 0 < invite.expires < _LATEST
                or not is_public_key(invite.account, "account")
                or not is_public_key(invite.issuer, "account")
            ):
                raise ValueError
        except (ValueError, ProtocolError, UserError):
            raise UserError(
                "this invite is damaged, with missing or changed letters: copy the whole line from `thinpipe hub`"
            ) from None
        return invite

    def line(self) -> str:
        """The invite as one line of text, with a checksum."""
        seed = base64.b32decode(self.seed + "=" * (-len(self.seed) % 8))
        account, issuer = raw_public_key(self.account), raw_public_key(self.issuer)
        fingerprint = bytes.fromhex(self.fingerprint)
        packed = PackedInvite(
            self.url, self.run, fingerprint, self.id, seed, account, issuer, self.expires, self.signature
        )
        body = msgspec.msgpack.encode(packed)
        return _PREFIX + _as_text(body + binascii.crc32(body).to_bytes(4))

    def __repr__(self) -> str:
        return f"Invite(url={self.url!r}, run={self.run!r}, id={self.id!r})"


def _as_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
