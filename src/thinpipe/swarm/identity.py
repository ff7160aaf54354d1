"""Who we are to a hub: the key that an invite was exchanged for, kept in a folder of ours, so that we may come back."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from thinpipe.core.config import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.invite import Invite
from thinpipe.swarm.keys import KeyPair
from thinpipe.swarm.messages import JoinAnswer, JoinRequest
from thinpipe.transport.nats.dial import UnknownKeyError, UnreachableError, connect
from thinpipe.transport.nats.post import Address

_FILE = "identity.toml"
_ANSWER_SECONDS = 30.0
_TRY_SECONDS, _KNOWN_SECONDS = 15.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Identity:
    run: str
    invite: str
    """The id of the invite that it came from."""
    url: str
    fingerprint: str
    name: str
    seed: str = field(repr=False)

    @property
    def address(self) -> Address:
        return Address(url=self.url, fingerprint=self.fingerprint, name=self.name, seed=self.seed)


def load_identity(folder: Path) -> Identity | None:
    return load_toml(folder / _FILE, Identity) if (folder / _FILE).exists() else None


def accept_invite(invite: Invite, folder: Path, *, name: str, numerics: Numerics) -> Identity:
    """Our own key for the invite's, which works once. With the same invite again: who we became the first time."""
    known = load_identity(folder)
    if known is not None:
        if (known.invite, known.fingerprint) == (invite.id, invite.fingerprint):
            return known
        raise UserError(
            f"{folder} belongs to another invite (run {known.run}, as {known.name}): give --folder another one, "
            f"or go on as {known.name} with `thinpipe join {folder}`"
        )
    pair, began = KeyPair.new(), time.monotonic()
    while True:
        try:
            identity = asyncio.run(_join(invite, pair, name, numerics))
        except (UnreachableError, UnknownKeyError) as error:
            # The server turns away those who are signing in while it reads its settings again.
            patience = _KNOWN_SECONDS if isinstance(error, UnknownKeyError) else _TRY_SECONDS
            if time.monotonic() - began > patience:
                raise
            time.sleep(0.2)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _FILE, dump_toml(identity).encode(), mode=0o600)
        return identity


async def _join(invite: Invite, pair: KeyPair, name: str, numerics: Numerics) -> Identity:
    """Is told our name, says that it was heard, and sees that our own key opens the door."""
    request = JoinRequest(public_key=pair.public_key, name=name, numerics=numerics)
    client = await connect(
        invite.url, invite.fingerprint, invite.seed, inbox=f"_INBOX.{invite.id}", on_down=lambda _error: None
    )
    try:
        answer = await _ask(client, invite, request)
        if answer.refusal:
            raise UserError(f"the hub refused: {answer.refusal}")
        heard = msgspec.structs.replace(request, name=answer.name, heard=True)
        with suppress(NatsError, OSError):  # whether it has arrived, we see below
            subject, inbox = f"join.{invite.id}", f"_INBOX.{invite.id}.heard"
            await client.publish(subject, msgspec.msgpack.encode(heard), reply=inbox)
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
    await _try(identity)
    return identity


async def _ask(client: Client, invite: Invite, request: JoinRequest) -> JoinAnswer:
    try:
        data = msgspec.msgpack.encode(request)
        answer = await client.request(f"join.{invite.id}", data, timeout=_ANSWER_SECONDS)
        return msgspec.msgpack.decode(answer.data, type=JoinAnswer)
    except (NatsError, OSError, msgspec.MsgspecError) as error:
        raise UnreachableError(
            f"the hub at {invite.url} did not answer ({error!r}): see that it runs, and try again"
        ) from error


async def _try(identity: Identity) -> None:
    """The server knows our key a moment after we said that we had heard our name."""
    deadline = time.monotonic() + _KNOWN_SECONDS
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
