"""A peer's identity: the name and key for which an invite was exchanged, stored in the peer's folder for rejoining."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import JoinAnswer, JoinRequest
from thinpipe.transport.nats.client import UnknownKeyError, UnreachableError, connect
from thinpipe.transport.nats.connection import Address

_LOG = logging.getLogger(__name__)
_IDENTITY_FILE = "identity.toml"
_ANSWER_SECONDS = 30.0
"""Timeout of a join request, in seconds."""
_REACH_SECONDS, _ADMITTED_SECONDS = 15.0, 4.0
"""`_REACH_SECONDS`: how long to retry while the broker is unreachable. `_ADMITTED_SECONDS`: how long to retry while the
broker rejects the key."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Name and key of a peer in a run, with the address of its hub."""

    run: str
    """Name of the run."""
    invite: str
    """Id of the invite that was exchanged for this identity."""
    url: str
    """URL of the broker."""
    fingerprint: str
    """sha256 fingerprint of the broker's certificate."""
    name: str
    """Peer name."""
    seed: str = field(repr=False)
    """Seed of the peer's key."""

    @property
    def address(self) -> Address:
        return Address(url=self.url, fingerprint=self.fingerprint, name=self.name, seed=self.seed)


def load_identity(folder: Path) -> Identity | None:
    """The identity stored in this folder; None if there is none."""
    return load_toml(folder / _IDENTITY_FILE, Identity) if (folder / _IDENTITY_FILE).exists() else None


def accept_invite(invite: Invite, folder: Path, *, name: str, numerics: Numerics) -> Identity:
    """Exchanges the invite's single-use key for a new key and stores the identity. With the same invite again: returns
    the stored identity. Raises UserError if the folder belongs to another invite."""
    known = load_identity(folder)
    if known is not None:
        if (known.invite, known.fingerprint) == (invite.id, invite.fingerprint):
            return known
        raise UserError(
            f"{folder} belongs to another invite (peer {known.name} of run {known.run}): choose another --folder, or "
            f"rejoin as {known.name} with `thinpipe join {folder}`"
        )
    pair, began = KeyPair.new(), time.monotonic()
    while True:
        try:
            identity = asyncio.run(_join(invite, pair, name, numerics))
        except (UnreachableError, UnknownKeyError) as error:
            # nats-server rejects clients that authenticate while it reloads its configuration.
            timeout_seconds = _ADMITTED_SECONDS if isinstance(error, UnknownKeyError) else _REACH_SECONDS
            if time.monotonic() - began > timeout_seconds:
                raise
            _LOG.info("joining failed, trying again: %s", error)
            time.sleep(0.2)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _IDENTITY_FILE, dump_toml(identity).encode(), mode=0o600)
        return identity


async def _join(invite: Invite, pair: KeyPair, name: str, numerics: Numerics) -> Identity:
    """Requests a name, confirms it, and waits until the broker accepts the new key."""
    request = JoinRequest(public_key=pair.public_key, name=name, numerics=numerics)
    client = await connect(
        invite.url, invite.fingerprint, invite.seed, inbox=f"_INBOX.{invite.id}", on_down=lambda _error: None
    )
    try:
        answer = await _ask(client, invite, request)
        if answer.refusal:
            raise UserError(f"the hub refused: {answer.refusal}")
        confirmed = msgspec.structs.replace(request, name=answer.name, confirmed=True)
        with suppress(NatsError, OSError):  # `_wait_until_admitted` shows whether it arrived
            subject, inbox = f"join.{invite.id}", f"_INBOX.{invite.id}.confirmed"
            await client.publish(subject, msgspec.msgpack.encode(confirmed), reply=inbox)
            await client.flush(timeout=5)
    finally:
        await client.close()
    identity = Identity(
        run=invite.run,
        invite=invite.id,
        url=invite.url,
        fingerprint=invite.fingerprint,
        name=answer.name,
        seed=pair.seed,
    )
    await _wait_until_admitted(identity)
    return identity


async def _ask(client: Client, invite: Invite, request: JoinRequest) -> JoinAnswer:
    try:
        data = msgspec.msgpack.encode(request)
        answer = await client.request(f"join.{invite.id}", data, timeout=_ANSWER_SECONDS)
        return decode_foreign(answer.data, JoinAnswer)
    except (NatsError, OSError) as error:
        raise UnreachableError(
            f"the hub at {invite.url} did not answer ({error!r}): check that it runs, and try again"
        ) from error


async def _wait_until_admitted(identity: Identity) -> None:
    """Connects with the new key until it works: the broker learns the key shortly after the confirmation."""
    deadline = time.monotonic() + _ADMITTED_SECONDS
    while True:
        try:
            address = identity.address
            client = await connect(
                address.url,
                address.fingerprint,
                address.seed,
                inbox=f"_INBOX.{address.name}",
                on_down=lambda _error: None,
            )
        except (UnreachableError, UnknownKeyError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            await client.close()
            return
