"""The line of text that lets somebody join a run once: where the hub is, how to know it, and a key for one use."""

import base64
import binascii
from typing import Self

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker_config import check_name
from thinpipe.swarm.keys import KeyPair

_PREFIX = "thinpipe1:"
MOST_CHARACTERS = 1024


class _Packed(msgspec.Struct, array_like=True):
    """As it is in the line: people copy it, so it is short."""

    url: str
    run: str
    fingerprint: bytes
    id: str
    seed: bytes


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever has the line can join: send it as you would a password."""

    url: str
    run: str
    """What the run is called."""
    fingerprint: str
    """Of the hub's certificate: nobody else can pass for the hub."""
    id: str
    seed: str
    """Of the key that works once."""

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether it begins like an invite."""
        return text.strip().startswith(_PREFIX)

    @classmethod
    def read(cls, line: str) -> Self:
        """Says what is wrong with a line that was cut or mistyped."""
        line = "".join(line.split())  # mail programs break lines
        if not line.startswith(_PREFIX):
            raise UserError(f"an invite begins with {_PREFIX!r}: copy the whole line that `thinpipe hub` printed")
        if len(line) > MOST_CHARACTERS:
            raise UserError("this invite is too long to be one: copy the line that `thinpipe hub` printed, and no more")
        try:
            text = line.removeprefix(_PREFIX)
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            body, checksum = data[:-4], data[-4:]
            if binascii.crc32(body).to_bytes(4) != checksum or _as_text(data) != text:
                raise ValueError
            packed = msgspec.msgpack.decode(body, type=_Packed)
            invite = cls(
                url=packed.url,
                run=packed.run,
                fingerprint=packed.fingerprint.hex(),
                id=packed.id,
                seed=base64.b32encode(packed.seed).decode().rstrip("="),
            )
            KeyPair.from_seed(invite.seed)
            check_name(invite.id)  # it becomes the name of a folder
        except (ValueError, msgspec.MsgspecError, UserError):
            raise UserError(
                "this invite is damaged: some of it is missing or changed; copy the whole line from `thinpipe hub`"
            ) from None
        return invite

    def line(self) -> str:
        seed = base64.b32decode(self.seed + "=" * (-len(self.seed) % 8))
        packed = _Packed(self.url, self.run, bytes.fromhex(self.fingerprint), self.id, seed)
        body = msgspec.msgpack.encode(packed)
        return _PREFIX + _as_text(body + binascii.crc32(body).to_bytes(4))

    def __repr__(self) -> str:
        return f"Invite(url={self.url!r}, run={self.run!r}, id={self.id!r})"


def _as_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
