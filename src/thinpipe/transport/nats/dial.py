"""One connection to the hub: TLS to the one certificate that was promised, our key, and no second chances.

Nothing reconnects by itself: mail may have been lost with a connection, and that is for the caller to know.
"""

import asyncio
import hashlib
import logging
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from thinpipe.core.errors import UserError

if TYPE_CHECKING:
    from nats.aio.client import Client

OnDown = Callable[[Exception], None]

_CONNECT_SECONDS = 15.0
_STEP_SECONDS = 5
"""For each of: reaching the address, the TLS handshake, the greeting, the answer to our key."""
_ABANDON_SECONDS = 0.3
_FLUSH_SECONDS = 10.0
"""A send that the socket has not taken after so long has failed."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)


class UnreachableError(UserError):
    """Nobody answers, or not in time: it may be worth another try."""


class UnknownKeyError(UserError):
    """The server does not let our key in: it was removed, or is not known yet."""


class _WrongCertificateError(ssl.SSLCertVerificationError):
    """Raised within the handshake, so that nothing of ours has been sent."""


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        shown = self.getpeercert(binary_form=True)
        assert isinstance(context, _PinnedContext)
        if shown is None or hashlib.sha256(shown).hexdigest() != context.fingerprint:
            raise _WrongCertificateError("the certificate is not the promised one")


class _PinnedContext(ssl.SSLContext):
    """Trusts one certificate, whoever signed it, whatever name and dates it bears."""

    sslobject_class = _PinnedObject
    fingerprint = ""


def pinned_context(fingerprint: str) -> ssl.SSLContext:
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise UserError(
            f"{fingerprint[:80]!r} is no fingerprint, which is 64 digits 0-9 and a-f: copy the invite whole"
        )
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.fingerprint = fingerprint
    return context


async def connect(url: str, fingerprint: str, seed: str, *, inbox: str, on_down: OnDown) -> "Client":
    """A connected client, or a UserError.

    `inbox` is the prefix of the subjects on which answers come: `_INBOX.<name>`. `on_down` is called in the loop's
    thread with all that goes wrong from then on: a lost connection, dropped mail, a send that the socket did not take,
    a subject that we may not use. The first is the cause; after any of them the connection is not to be trusted.
    Always a ConnectionError; the client's own is its cause. Closing the client calls it too.
    """
    _check_url(url)
    _check_seed(seed)
    context = pinned_context(fingerprint)
    from nats.aio.client import Client

    logging.getLogger("asyncio").addFilter(_worth_reading)
    client = Client()
    faults = _Faults(client, on_down)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(url, tls=context, nkeys_seed_str=seed, inbox_prefix=inbox, **_settings(faults))
        if not client.is_connected:
            raise ConnectionError("it hung up during the greeting")
    except BaseException as error:
        await _abandon(client)
        if not isinstance(error, Exception):
            raise
        raise _in_plain_words(url, faults.first or error) from error
    faults.connected = True
    return client


class _Faults:
    """What the client reports: remembered while connecting, told to the caller afterwards."""

    def __init__(self, client: "Client", on_down: OnDown) -> None:
        self.connected = False
        self.first: Exception | None = None
        self._client, self._on_down = client, on_down

    async def error(self, error: Exception) -> None:
        self.first = self.first or error
        if self.connected:
            try:
                self._on_down(as_connection_error(error))
            except Exception as problem:  # would end the client's reader, which nobody would notice
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


def _worth_reading(record: logging.LogRecord) -> bool:
    """Every end of a connection that became TLS after it was opened makes asyncio say this, which means nothing."""
    return "eof_received() has no effect" not in str(record.msg)


def _settings(faults: _Faults) -> dict[str, Any]:
    return {
        "tls_hostname": "hub",
        "tls_handshake_first": True,
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,  # else an address that nobody answers at is tried 60 times
        "reconnect_time_wait": 0,
        "connect_timeout": _STEP_SECONDS,
        "pending_size": 1,  # publish waits for the socket, and raises when there is none
        "flush_timeout": _FLUSH_SECONDS,
        "ping_interval": 5,
        "max_outstanding_pings": 3,
        "error_cb": faults.error,
        "closed_cb": faults.closed,
    }


async def _abandon(client: "Client") -> None:
    """Closes what a failed attempt has opened; after a failed handshake a client waits in vain for its socket's end."""
    try:
        async with asyncio.timeout(_ABANDON_SECONDS):
            await client.close()
    except Exception:
        pass  # half a client may fail to close in many ways, and why it could not connect is being told


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme == "tls" and parts.hostname and parts.port
    except ValueError:
        whole = False
    if not whole:
        raise UserError(f"{url[:200]!r} is no address of a hub, which looks like tls://203.0.113.5:4222")


def _check_seed(seed: str) -> None:
    import nkeys  # type: ignore[import-untyped]

    try:
        nkeys.from_seed(bytearray(seed, "ascii"))
    except (nkeys.NkeysError, ValueError, IndexError):
        raise UserError(
            "our key is damaged (it is no seed, 58 letters and digits from SU on): ask for a new invite"
        ) from None


def _in_plain_words(url: str, error: Exception) -> UserError:
    text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    if isinstance(error, _WrongCertificateError):
        return UserError(
            f"the server at {url} is not the hub that invited you: its certificate is another, so nothing was sent. "
            "Ask for a new invite if the hub was set up anew; otherwise somebody is in between"
        )
    if "authorization violation" in text.lower():
        return UnknownKeyError(
            f"the hub at {url} does not know our key: it was used up or removed. Ask for a new invite"
        )
    if isinstance(error, ssl.SSLError):
        return UserError(f"what answers at {url} is not a hub ({text}): check the address and the port")
    return UnreachableError(
        f"there is no hub to reach at {url} ({text}): see that it runs and that its port is open, then try again"
    )
