"""The hub as NATS operator and account: the keys with which it signs, and the JWTs that it issues.

Four kinds of users, each signed with a key of its own that fixes the permissions of all its users; the server puts a
user's name in the place of `{{name()}}`. So permissions are the hub's even for JWTs issued long ago, and a JWT is short
enough for an invite:

- hub: every subject of the account; never given away.
- peer: publishes only under its own name (`m.<to>.<from>.<kind>`: permissions fix <from>) and subscribes only to
  broadcasts and to messages for itself.
- renewal: the same key under the same name, for nothing but asking for a new peer JWT.
- invite: may only publish on `join.<id>` and receive replies.

**Clocks.** The server compares `exp` with the clock of the hub's machine, no other; members' clocks have no part. A
peer's JWT expires long after it was renewed last (`PEER_SECONDS`), because the server cuts a connection when the JWT
with which it signed in expires, and that can only be changed by signing in again. A renewal never expires, so a hub
whose clock jumps renews everybody. Who is kicked is revoked by key, for good: nothing of that depends on a clock.
Expiry alone would matter to a server that the hub cannot reach, of which there is none.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from thinpipe.swarm.protocol.jwt import sign_jwt, user_claims
from thinpipe.swarm.protocol.keys import KeyPair, Kind
from thinpipe.swarm.protocol.names import HUB
from thinpipe.transport.nats.client import Credentials

PEER_SECONDS = 90 * 86400
"""Seconds for which a peer's JWT is valid; renewed every day while the peer works."""
_FOREVER = 253402300799
"""Time of every revocation, the end of the year 9999: it holds for all JWTs of the key, whatever the clock says."""
_SERVER_SUBJECTS = ["$JS.>", "$KV.>", "$O.>", "$SYS.>"]
"""Subjects of the server itself. Peers are not allowed to use them anyway; the explicit deny overrides any later
allow."""
_KIB = 1 << 10
PEER_MESSAGE_NBYTES = 2112 * _KIB
"""Bytes of the longest message of a peer that the server passes on; one that sends a longer one is cut off."""
_LIMITS = {"peers": (1024, PEER_MESSAGE_NBYTES), "renewals": (4, 4 * _KIB), "invites": (4, 264 * _KIB)}
"""Subscriptions of a connection (a peer has two to each member of its generation), and bytes of a message: of what hub
and members accept (`hub.services.budgets`, `transport.nats.streams`), the longest."""
_NAME = "{{name()}}"
_INBOX = f"_INBOX.{_NAME}.>"
_SUBJECTS = {
    "peers": ([f"m.*.{_NAME}.>", f"{HUB}.{_NAME}.>"], [f"m.{_NAME}.>", _INBOX, "bcast.>"]),
    "renewals": ([f"{HUB}.{_NAME}.renew"], [_INBOX]),
    "invites": ([f"join.{_NAME}"], [_INBOX]),
}
"""Subjects on which users may publish, and to which they may subscribe, by the key that signs them."""
_KINDS: dict[str, Kind] = {"operator": "operator"}


@dataclass(frozen=True, kw_only=True)
class AuthoritySeeds:
    """Seeds of the keys with which the hub signs. Whoever has them is the hub."""

    operator: str = field(repr=False)
    """Of the operator, whom the server trusts: signs accounts."""
    system: str = field(repr=False)
    """Of the server's system account, where connects and disconnects are published."""
    account: str = field(repr=False)
    """Of the account of hub and peers."""
    peers: str = field(repr=False)
    renewals: str = field(repr=False)
    invites: str = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        return cls(**{name: KeyPair.new(_KINDS.get(name, "account")).seed for name in cls.__dataclass_fields__})


class Authority:
    """Issues JWTs. `clock`: seconds since 1970."""

    def __init__(self, seeds: AuthoritySeeds, clock: Callable[[], float] = time.time) -> None:
        self._keys = {
            name: KeyPair.from_seed(getattr(seeds, name), _KINDS.get(name, "account"))
            for name in seeds.__dataclass_fields__
        }
        self.clock = clock

    @property
    def account(self) -> str:
        """Public key of the account of hub and peers, which is also its name at the server."""
        return self._keys["account"].public_key

    @property
    def system_account(self) -> str:
        return self._keys["system"].public_key

    @property
    def operator(self) -> str:
        """Public key of the operator."""
        return self._keys["operator"].public_key

    @property
    def invite_issuer(self) -> str:
        """Public key that signs invites."""
        return self._keys["invites"].public_key

    def operator_jwt(self) -> str:
        claims = {"type": "operator", "version": 2, "system_account": self.system_account}
        return self._statement("operator", "thinpipe", claims)

    def system_jwt(self) -> str:
        return self._statement("system", "system", _account_claims())

    def account_jwt(self, revoked: Iterable[str]) -> str:
        """JWT of the account of hub and peers; `revoked`: keys that may not sign in, and whose connections are cut."""
        scopes = [_scope(self._keys[role].public_key, role) for role in _SUBJECTS]
        claims = {
            **_account_claims(),
            "signing_keys": scopes,
            "revocations": dict.fromkeys(revoked, _FOREVER),
        }
        return self._statement("account", "run", claims)

    def hub_credentials(self) -> Credentials:
        """Credentials with a new key for every subject."""
        return self._owner("account", HUB)

    def admin_credentials(self) -> Credentials:
        """Credentials with a new key for the server's system account."""
        return self._owner("system", "admin")

    def peer_jwt(self, name: str, public_key: str) -> str:
        return self._user("peers", name, public_key, int(self.clock()) + PEER_SECONDS)

    def renewal_jwt(self, name: str, public_key: str) -> str:
        """JWT that never expires and only allows to ask for a new `peer_jwt`."""
        return self._user("renewals", name, public_key, None)

    def invite_jwt(self, invite: str, public_key: str, expires: int) -> str:
        return self._user("invites", invite, public_key, expires)

    def _owner(self, account: str, name: str) -> Credentials:
        """Credentials without limits, signed by the account itself."""
        pair = KeyPair.new()
        unlimited = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
        claims = {"name": name, "sub": pair.public_key, "nats": unlimited}
        return Credentials(seed=pair.seed, jwt=sign_jwt(claims, self._keys[account]))

    def _user(self, role: str, name: str, public_key: str, expires: int | None) -> str:
        return sign_jwt(user_claims(name, public_key, self.account, expires=expires), self._keys[role])

    def _statement(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A statement of the operator about one of its accounts, or itself."""
        public_key = self._keys[subject].public_key
        return sign_jwt({"name": name, "sub": public_key, "nats": claims}, self._keys["operator"])


def _account_claims() -> dict[str, Any]:
    """Claims of an account without leaf nodes, imports, exports and JetStream."""
    unlimited = dict.fromkeys(("subs", "data", "payload", "conn"), -1)
    limits = {**unlimited, "wildcards": True, "imports": 0, "exports": 0, "leaf": 0}
    return {"type": "account", "version": 2, "limits": limits, "default_permissions": {"pub": {}, "sub": {}}}


def _scope(public_key: str, role: str) -> dict[str, Any]:
    (publish, subscribe), (subscriptions, nbytes) = _SUBJECTS[role], _LIMITS[role]
    permissions = {"pub": {"allow": publish, "deny": _SERVER_SUBJECTS}, "sub": {"allow": subscribe}}
    template = {**permissions, "subs": subscriptions, "data": -1, "payload": nbytes}
    return {"kind": "user_scope", "key": public_key, "role": role, "template": template}
