"""Exchanges an invite for membership: this machine's key, which is on disk before, is entered at the hub.

A program that dies at any moment, or an answer that is lost, costs nothing: the same invite in the same folder asks
again with the same key, and the hub gives the same answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from nats.errors import Error as NatsError

from thinpipe.config.hub import JoinConfig
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.numerics import Numerics, numerics
from thinpipe.core.units import utc_text
from thinpipe.swarm.peer.clock import wrong_clock_text
from thinpipe.swarm.peer.disclosure import Tell
from thinpipe.swarm.peer.identity import Identity, joining_key, load_identity, save_identity
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import InviteCheck, InviteState, JoinAnswer, JoinRequest
from thinpipe.transport.nats.client import RefusedKeyError, UnreachableError, connect
from thinpipe.transport.nats.direct_client import DirectClient

_LOG = logging.getLogger(__name__)
_ANSWER_SECONDS = 30.0
"""Timeout of a join request, in seconds."""
_REACH_SECONDS = 15.0
"""How long to retry while the broker is unreachable."""


def load_or_join(config: JoinConfig, tell: Tell, print_line: Callable[[str], None]) -> tuple[Identity, Path]:
    """Identity and folder of the peer, from a folder joined before or by accepting an invite. `tell` is called
    before anything is sent but the invite's own key; `print_line` with what is done."""
    given = Path(config.invite)
    if config.invite and not Invite.is_invite(config.invite) and given.is_dir():
        identity = load_identity(given)
        if identity is None:
            raise UserError(f"{given} is not the folder of an earlier `thinpipe join`: pass the invite instead")
        identity = replace(identity, url=config.address_in(identity.url))
        print_line(f"dialling {identity.url}, the hub of run {identity.run}, as {identity.name}")
        return identity, given
    invite = Invite.read(config.invite)
    invite = msgspec.structs.replace(invite, url=config.address_in(invite.url))
    folder = config.folder or Path("joined") / invite.id
    print_line(f"dialling {invite.url}, the hub of run {invite.run}, for up to {_REACH_SECONDS:.0f} s")
    return accept_invite(invite, folder, name=config.name, numerics=numerics(), tell=tell), folder


def accept_invite(
    invite: Invite,
    folder: Path,
    *,
    name: str,
    numerics: Numerics,
    tell: Tell = lambda *_what: None,
) -> Identity:
    """Joins with the invite and stores the identity. With the same invite again: returns the stored identity. Raises
    UserError if the folder belongs to another invite, or if the hub refuses. `tell`: as `load_or_join`."""
    known = load_identity(folder)
    if known is not None:
        if (known.invite, known.fingerprint) == (invite.id, invite.fingerprint):
            return known
        raise UserError(
            f"{folder} belongs to another invite (peer {known.name} of run {known.run}): choose another --folder, or "
            f"rejoin as {known.name} with `thinpipe join {folder}`"
        )
    pair, began = joining_key(folder), time.monotonic()
    while True:
        try:
            identity = asyncio.run(_join(invite, pair, name, numerics, folder, tell))
        except UnreachableError as error:
            if time.monotonic() - began > _REACH_SECONDS:
                raise
            _LOG.info("joining failed, trying again: %s", error)
            time.sleep(0.2)
            continue
        save_identity(folder, identity)
        return identity


async def connect_as_invited(invite: Invite) -> DirectClient:
    """Connects with the invite's key. Raises UserError with a reason for people."""
    inbox = f"_INBOX.{invite.id}"
    try:
        return await connect(
            invite.url, invite.fingerprint, invite.credentials, inbox=inbox, on_down=lambda _error: None
        )
    except RefusedKeyError as error:
        raise RefusedKeyError(
            f"the hub at {invite.url} does not accept the key of this invite: it was revoked, or its peer was removed, "
            f"or it ended long ago (it could be used until {utc_text(invite.expires)}, and this machine's clock says "
            f"{utc_text(time.time())}). Ask for a new invite"
        ) from error


async def _join(invite: Invite, pair: KeyPair, name: str, numerics: Numerics, folder: Path, tell: Tell) -> Identity:
    """Asks to join and returns who we are then."""
    client = await connect_as_invited(invite)
    request = JoinRequest(public_key=pair.public_key, name=name, numerics=numerics)
    try:
        state = decode_foreign(await _ask(client, invite, InviteCheck()), InviteState)
        tell(state.who_reads, invite.run, invite.url, folder)
        answer = decode_foreign(await _ask(client, invite, request), JoinAnswer)
    except (NatsError, OSError) as error:
        raise UnreachableError(
            f"the hub at {invite.url} did not answer ({error!r}): check that it runs, and try again"
        ) from error
    finally:
        await client.close()
    wrong_clock = wrong_clock_text(answer.time_s)
    if answer.refusal:
        raise UserError("; ".join(filter(None, (f"the hub refused: {answer.refusal}", wrong_clock))))
    if wrong_clock:
        _LOG.warning("%s", wrong_clock)
    return Identity(
        run=invite.run,
        invite=invite.id,
        url=invite.url,
        fingerprint=invite.fingerprint,
        name=answer.name,
        seed=pair.seed,
        jwt=answer.jwt,
        renewal=answer.renewal,
    )


async def _ask(client: DirectClient, invite: Invite, request: JoinRequest | InviteCheck) -> bytes:
    data = msgspec.msgpack.encode(request)
    return (await client.request(f"join.{invite.id}", data, timeout=_ANSWER_SECONDS)).data
