"""JWTs of NATS: signed statements of what a key may do, which the server checks by itself when somebody signs in.

Written here because no maintained library on PyPI makes NATS JWTs (as of November 2026); `nkeys` signs. Pure. A user's
JWT names no permissions: they belong to the key that signs it, and stand in the account's JWT (`broker.authority`).
"""

import base64
from typing import Any

import msgspec

from thinpipe.swarm.protocol.keys import KeyPair, is_signed_by

ISSUED = 1
"""When every JWT says that it was issued, in seconds since 1970. The server compares it with the time of a revocation,
so no clock has a part in that; it takes a JWT that does not say when it was issued, or 0, for revoked."""
_HEADER = b'{"typ":"JWT","alg":"ed25519-nkey"}'


def sign_jwt(claims: dict[str, Any], key: KeyPair) -> str:
    """The JWT of these claims, signed with this key, which becomes their issuer."""
    text = _signed_text({"iat": ISSUED, **claims, "iss": key.public_key})
    return f"{text}.{_base64(key.sign(text.encode()))}"


def jwt_from_signature(claims: dict[str, Any], signature: bytes) -> str:
    """The JWT of these claims, issuer included, whose signature is known."""
    return f"{_signed_text(claims)}.{_base64(signature)}"


def signature_of(jwt: str) -> bytes:
    """The signature in a JWT of our own."""
    text = jwt.rpartition(".")[2]
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def is_jwt_signed_by(jwt: str, public_key: str) -> bool:
    """True if a JWT of our own was signed with this key."""
    return is_signed_by(public_key, jwt.rpartition(".")[0].encode(), signature_of(jwt))


def user_claims(name: str, public_key: str, account: str, *, expires: int | None) -> dict[str, Any]:
    """Claims that let a key sign in to an account under a name. `expires`: seconds since 1970; None: never.

    An invite carries its JWT without this text (`protocol.invite`): whoever changes the text changes the invites'
    prefix.
    """
    nats = {"issuer_account": account, "type": "user", "version": 2}
    claims = {"iat": ISSUED, "name": name, "sub": public_key, "nats": nats}
    return claims if expires is None else {**claims, "exp": expires}


def _signed_text(claims: dict[str, Any]) -> str:
    return f"{_base64(_HEADER)}.{_base64(msgspec.json.encode(claims, order='sorted'))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
