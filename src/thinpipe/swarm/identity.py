"""Who we are to a hub: the key that an invite was exchanged for, kept in a folder of ours, so that we may come back."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from thinpipe.core.config import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.invite import Invite
from thinpipe.swarm.keys import KeyPair
from thinpipe.swarm.messages import JoinAnswer, JoinRequest
from thinpipe.transport.nats.dial import UnreachableError, connect
from thinpipe.transport.nats.post import Address

_FILE = "identity.toml"
_ANSWER_SECONDS = 30.0
_TRY_SECONDS = 5.0


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


def accept_invite(invite: Invite, folder: Path, *, name: str, code: str) -> Identity:
    """Our own key for the invite's, which works once. With the same invite again: who we became the first time."""
    known = load_identity(folder)
    if known is not None:
        if (known.invite, known.fingerprint) == (invite.id, invite.fingerprint):
            return known
        raise UserError(
            f"{folder} belongs to another invite (run {known.run}, as {known.name}): give --folder another one, "
            f"or go on as {known.name} with `thinpipe join {folder}`"
        )
    pair = KeyPair.new()
    answer = _ask_until_answered(invite, JoinRequest(public_key=pair.public_key, name=name, code=code))
    if answer.refusal:
        raise UserError(f"the hub refused: {answer.refusal}")
    identity = Identity(
        run=invite.run,
        invite=invite.id,
        url=invite.url,
        fingerprint=invite.fingerprint,
        name=answer.name,
        seed=pair.seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _FILE, dump_toml(identity).encode(), mode=0o600)
    return identity


def _ask_until_answered(invite: Invite, request: JoinRequest) -> JoinAnswer:
    """The server hangs up on those who are signing in while it reads its settings again, as when another joins."""
    deadline = time.monotonic() + _TRY_SECONDS
    while True:
        try:
            return asyncio.run(_ask(invite, request))
        except UnreachableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


async def _ask(invite: Invite, request: JoinRequest) -> JoinAnswer:
    client = await connect(
        invite.url, invite.fingerprint, invite.seed, inbox=f"_INBOX.{invite.id}", on_down=lambda _error: None
    )
    try:
        answer = await client.request(f"join.{invite.id}", msgspec.msgpack.encode(request), timeout=_ANSWER_SECONDS)
        return msgspec.msgpack.decode(answer.data, type=JoinAnswer)
    except Exception as error:
        raise UserError(
            f"the hub at {invite.url} did not answer ({error!r}): see that it runs, and try again"
        ) from error
    finally:
        await client.close()
