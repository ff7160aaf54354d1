"""Register of a hub: its members, its invites and the keys that it has revoked, kept in `members.json`.

Every change is on disk before anybody is answered. Written by the hub alone; its clock decides when an invite ends.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from thinpipe.core.bounds import Clock, Name, Word
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.protocol.invite import GRACE_SECONDS
from thinpipe.swarm.protocol.keys import is_public_key
from thinpipe.swarm.protocol.names import check_name

Value = TypeVar("Value")


class IssuedInvite(msgspec.Struct, frozen=True, kw_only=True):
    """An invite that was issued and not revoked."""

    public_key: Word
    expires_s: Clock
    """When it ends, in seconds since 1970."""
    for_name: Name = ""
    """Name that the newcomer gets, kept for a machine of the hub's owner; empty: any other name."""
    used_by: Name = ""
    """Member that it was exchanged for; empty while nobody has used it."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that has joined."""

    public_key: Word
    invite: Name = ""
    """Invite with which it joined."""
    joined_s: Clock = 0.0


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk."""

    members: dict[Name, Member] = {}
    invites: dict[Name, IssuedInvite] = {}
    revoked: Annotated[tuple[Word, ...], "public keys"] = ()


class Register:
    """The register in this file. Not safe for use by several threads at once. Raises UserError for what cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = _load(path)
        self._names = {member.public_key: name for name, member in self._table.members.items()}
        self._peers = {name: member.public_key for name, member in self._table.members.items()}

    @property
    def peers(self) -> dict[str, str]:
        """Public keys by name of the member; replaced at each change."""
        return self._peers

    @property
    def members(self) -> dict[str, Member]:
        return self._table.members

    @property
    def invites(self) -> dict[str, IssuedInvite]:
        return self._table.invites

    @property
    def revoked(self) -> tuple[str, ...]:
        return self._table.revoked

    def name_of(self, public_key: str) -> str | None:
        """Name of the member with this key."""
        return self._names.get(public_key)

    def add_member(self, name: str, member: Member) -> None:
        """Enters a member, and that its invite is used, in one change."""
        self._check_new(name, member.public_key)
        invites = self._table.invites
        if member.invite:
            invite = invites.get(member.invite)
            if invite is None or invite.used_by:
                raise UserError("the invite was revoked, or used by somebody else, meanwhile")
            invites = {**invites, member.invite: msgspec.structs.replace(invite, used_by=name)}
        self._save(members={**self._table.members, name: member}, invites=invites)
        self._peers = {**self._peers, name: member.public_key}
        self._names[member.public_key] = name

    def remove_member(self, name: str) -> None:
        """Strikes a member off and revokes its key, and that of the invite with which it came."""
        member = self._table.members.get(name)
        if member is None:
            known = ", ".join(self._table.members) or "none"
            raise UserError(f"there is no peer {name[:80]!r}; peers: {known[:1000]}")
        invite = self._table.invites.get(member.invite)
        keys = (member.public_key,) if invite is None else (member.public_key, invite.public_key)
        self._save(
            members=_without(self._table.members, name),
            invites=_without(self._table.invites, member.invite),
            revoked=(*self._table.revoked, *keys),
        )
        self._peers = _without(self._peers, name)
        del self._names[member.public_key]

    def add_invite(self, identity: str, invite: IssuedInvite, now: float) -> None:
        """Enters an invite; forgets those that the server lets in no more."""
        self._check_new(identity, invite.public_key)
        kept = {name: each for name, each in self._table.invites.items() if each.expires_s + GRACE_SECONDS > now}
        self._save(invites={**kept, identity: invite})

    def revoke_invite(self, identity: str) -> None:
        """Revokes the key of an invite that nobody has used."""
        invite = self._table.invites.get(identity)
        if invite is None or invite.used_by:
            used = f", because {invite.used_by} has used it: `thinpipe kick` removes a peer" if invite else ""
            known = ", ".join(name for name, each in self._table.invites.items() if not each.used_by) or "none"
            raise UserError(f"there is no invite {identity[:80]!r} to revoke{used}; open invites: {known[:1000]}")
        self._save(invites=_without(self._table.invites, identity), revoked=(*self._table.revoked, invite.public_key))

    def _check_new(self, name: str, public_key: str) -> None:
        check_name(name)
        if name in self._table.members or name in self._table.invites:  # an invite and a peer would share an inbox
            what = "a peer" if name in self._table.members else "an invite"
            raise UserError(f"there is already {what} {name}: choose another name")
        if not is_public_key(public_key):
            raise UserError(f"{public_key[:80]!r} is not a user's public key (56 letters and digits from U on)")
        if public_key in self._names or public_key in self._table.revoked:
            raise UserError("the key is in use, or was revoked: create a new key")

    def _save(self, **changes: object) -> None:
        table = msgspec.structs.replace(self._table, **changes)
        write_atomically(self._path, msgspec.json.encode(table), mode=0o600)
        self._table = table


def _without(table: dict[str, Value], name: str) -> dict[str, Value]:
    return {key: value for key, value in table.items() if key != name}


def _load(path: Path) -> _Table:
    if not path.exists():
        return _Table()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Table)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a backup") from None
