"""Opens one NATS connection to the hub: TLS with a pinned certificate, a JWT and the key that it names, no reconnect.

There is no reconnect because messages may have been lost with the connection, and the caller must know.
"""

import asyncio
import base64
import hashlib
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from thinpipe.core.errors import UserError

if TYPE_CHECKING:
    from thinpipe.transport.nats.direct_client import DirectClient

OnDown = Callable[[Exception], None]
_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 15.0
"""Limit for the whole connection attempt."""
_STEP_SECONDS = 5
"""Limit in seconds for each of: TCP connect, TLS handshake, server greeting, authentication."""
_ABANDON_SECONDS = 0.3
"""Limit for closing the client of a failed attempt."""
_FLUSH_SECONDS = 10.0
"""Seconds after which a send that the socket has not taken has failed."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)


class UnreachableError(UserError):
    """The server does not answer, or not in time; a retry may succeed."""


class RefusedKeyError(UserError):
    """The server lets nobody in with this key and JWT: revoked, expired by the server's clock, or of another hub."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What signs a program in at the hub's server."""

    seed: str = field(repr=False)
    """Seed (private key) of the program."""
    jwt: str = field(repr=False)
    """The hub's statement of which name the key has there, and what it may do."""


class _WrongCertificateError(ssl.SSLCertVerificationError):
    """Certificate mismatch, raised within the TLS handshake, before any application data is sent."""


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        shown = self.getpeercert(binary_form=True)
        assert isinstance(context, _PinnedContext)
        if shown is None or hashlib.sha256(shown).hexdigest() != context.fingerprint:
            raise _WrongCertificateError("the certificate is not the promised one")


class _PinnedContext(ssl.SSLContext):
    """TLS context that accepts exactly one certificate, by its fingerprint; issuer, host name and dates are ignored."""

    sslobject_class = _PinnedObject
    fingerprint = ""


def pinned_context(fingerprint: str) -> ssl.SSLContext:
    """TLS 1.3 context pinned to the certificate with this sha256, in hex. Raises UserError if it is malformed."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise UserError(
            f"{fingerprint[:80]!r} is no fingerprint, which is 64 digits 0-9 and a-f: copy the invite whole"
        )
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.fingerprint = fingerprint
    return context


async def connect(
    url: str, fingerprint: str, credentials: Credentials, *, inbox: str, on_down: OnDown
) -> "DirectClient":
    """Returns a connected client. Raises UserError on failure.

    `inbox`: prefix of the subjects of replies, `_INBOX.<name>`. `on_down` is called in the loop's thread, with a
    ConnectionError, for every later problem: a lost connection, dropped messages, a send that the socket did not take,
    a subject without permission. The first one is the cause; after any of them the connection is unusable. An
    exception of the NATS client is the `__cause__`. Closing the client also calls `on_down`.
    """
    from thinpipe.transport.nats.direct_client import DirectClient

    _check_url(url)
    sign = _signer(credentials.seed)
    context = pinned_context(fingerprint)
    logging.getLogger("asyncio").addFilter(_is_not_eof_warning)
    client = DirectClient()
    errors = _ConnectionErrors(client, on_down)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(
                url,
                tls=context,
                user_jwt_cb=credentials.jwt.encode,
                signature_cb=lambda nonce: base64.b64encode(sign(nonce.encode())),
                inbox_prefix=inbox,
                **_settings(errors),
            )
        if not client.is_connected:
            raise ConnectionError("it hung up during the greeting")
    except BaseException as error:
        await client.close_within(_ABANDON_SECONDS)
        if not isinstance(error, Exception):
            raise
        raise _as_user_error(url, errors.first or error) from error
    errors.connected = True
    return client


class _ConnectionErrors:
    """Error callbacks of the NATS client: stores the first error, and reports errors to `on_down` once connected."""

    def __init__(self, client: "DirectClient", on_down: OnDown) -> None:
        self.connected = False
        self.first: Exception | None = None
        self._client, self._on_down = client, on_down

    async def error(self, error: Exception) -> None:
        self.first = self.first or error
        if self.connected:
            try:
                self._on_down(as_connection_error(error))
            except Exception as problem:  # would silently end the client's read loop
                asyncio.get_running_loop().call_exception_handler({"message": "on_down failed", "exception": problem})

    async def closed(self) -> None:
        reason = self._client.last_error
        await self.error(ConnectionError("the connection to the hub is closed" + (f" ({reason})" if reason else "")))


def as_connection_error(error: Exception) -> ConnectionError:
    if isinstance(error, ConnectionError):
        return error
    wrapped = ConnectionError(f"the connection to the hub failed: {error}")
    wrapped.__cause__ = error
    return wrapped


def _is_not_eof_warning(record: logging.LogRecord) -> bool:
    """Log filter for a harmless asyncio warning at the end of every connection that was upgraded to TLS."""
    return "eof_received() has no effect" not in str(record.msg)


def _settings(errors: _ConnectionErrors) -> dict[str, Any]:
    return {
        "tls_hostname": "hub",
        "tls_handshake_first": True,
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,  # the default tries an unreachable address 60 times
        "reconnect_time_wait": 0,
        "connect_timeout": _STEP_SECONDS,
        "pending_size": 1,  # publish waits for the socket, and raises without one
        "flush_timeout": _FLUSH_SECONDS,
        "ping_interval": 5,
        "max_outstanding_pings": 3,
        "error_cb": errors.error,
        "closed_cb": errors.closed,
    }


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme == "tls" and parts.hostname and parts.port
    except ValueError:
        whole = False
    if not whole:
        raise UserError(f"{url[:200]!r} is no address of a hub, which looks like tls://203.0.113.5:4222")


def _signer(seed: str) -> Callable[[bytes], bytes]:
    """Function that signs with this seed. Raises UserError if the seed is damaged."""
    import nkeys  # type: ignore[import-untyped]

    try:
        sign: Callable[[bytes], bytes] = nkeys.from_seed(bytearray(seed, "ascii")).sign
    except (nkeys.NkeysError, ValueError, IndexError):
        raise UserError(
            "our key is damaged (it is no seed, 58 letters and digits from SU on): ask for a new invite"
        ) from None
    return sign


def _as_user_error(url: str, error: Exception) -> UserError:
    text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    if isinstance(error, _WrongCertificateError):
        return UserError(
            f"the server at {url} is not the hub that invited you: its certificate is another, so nothing was sent. "
            "Ask for a new invite if the hub was set up anew; otherwise somebody is in between"
        )
    if "authorization violation" in text.lower():
        return RefusedKeyError(f"the hub at {url} does not accept our key: it was removed. Ask for a new invite")
    if isinstance(error, ssl.SSLError):
        return UserError(f"what answers at {url} is not a hub ({text}): check the address and the port")
    return UnreachableError(
        f"there is no hub to reach at {url} ({text}): see that it runs and that its port is open, then try again"
    )
