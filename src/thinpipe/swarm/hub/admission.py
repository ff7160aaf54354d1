"""Admission of new peers: a newcomer exchanges the single-use key of an invite for its own key.

Two steps, because the broker cuts the invite's connection as soon as the invite is used up: first the hub offers a
name, then the newcomer confirms it and is admitted. Whichever message is lost, the newcomer is admitted or can ask
again. Before joining, an invite's holder may probe its link, which does not use up the invite.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.numerics import Numerics, numerics_mismatch
from thinpipe.swarm.broker.broker import Broker, BrokerError
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.keys import KeyPair, is_public_key
from thinpipe.swarm.protocol.messages import JoinAnswer, JoinRequest
from thinpipe.swarm.protocol.names import check_name
from thinpipe.swarm.protocol.probe import probe_service


class Admission:
    """Handles join requests. `numerics`: what newcomers must match. `print_line` prints a line for the
    hub's owner."""

    def __init__(
        self, broker: Broker, *, run: str, public_url: str, numerics: Numerics, print_line: Callable[[str], None]
    ) -> None:
        self._broker, self._run, self._url, self._numerics, self._print = broker, run, public_url, numerics, print_line
        self._offers: dict[str, JoinRequest] = {}
        """By invite id: the expected confirmation, which is the newcomer's last request with the offered name."""

    async def open(self, client: Client) -> None:
        """Starts to serve join requests on the hub's connection."""
        self._client = client
        await client.subscribe("join.*", cb=self._on_message)
        await client.flush(timeout=10)

    async def invite(self) -> Invite:
        """Creates a new invite, for one newcomer."""
        pair, identity = KeyPair.new(), f"i{secrets.token_hex(6)}"
        await asyncio.to_thread(self._broker.add_invite, identity, pair.public_key)
        return Invite(url=self._url, run=self._run, fingerprint=self._broker.fingerprint, id=identity, seed=pair.seed)

    def numerics_mismatch(self, numerics: Numerics) -> str:
        """Why a peer with these numerics cannot take part; empty if it can."""
        return sanitize(numerics_mismatch(numerics, self._numerics))

    async def _on_message(self, message: Msg) -> None:
        """Handles a join request, its confirmation or a bandwidth probe."""
        invite = message.subject.split(".")[1]
        if not message.reply.startswith(f"_INBOX.{invite}.") or invite not in self._broker.invites:
            return
        try:
            request = decode_foreign(message.data, JoinRequest)
        except ProtocolError:
            with suppress(ProtocolError):
                await self._client.publish(message.reply, await probe_service(invite, message.data))
            return
        if request.confirmed and request == self._offers.get(invite):
            await self._admit(invite, request)
        else:
            await self._client.publish(message.reply, msgspec.msgpack.encode(self._offer(invite, request)))

    def _offer(self, invite: str, request: JoinRequest) -> JoinAnswer:
        """Offers a name to a newcomer, or refuses it."""
        self._offers.pop(invite, None)
        name = request.name or self._free_name()
        refusal = self._refusal(request, name)
        if refusal:
            return JoinAnswer(refusal=refusal)
        self._offers[invite] = msgspec.structs.replace(request, name=name, confirmed=True)
        return JoinAnswer(name=name)

    async def _admit(self, invite: str, request: JoinRequest) -> None:
        """Turns the invite into a peer. The client runs callbacks one after the other, so no other join request is
        handled meanwhile."""
        try:
            await asyncio.to_thread(self._broker.admit, invite, request.name, request.public_key)
        except (UserError, BrokerError) as error:  # an exception in this callback would end the hub's connection
            self._print(f"{request.name} could not be admitted: {error}")
        else:
            self._print(f"{request.name} was admitted with an invite")
        finally:
            self._offers.pop(invite, None)

    def _refusal(self, request: JoinRequest, name: str) -> str:
        if mismatch := self.numerics_mismatch(request.numerics):
            return mismatch
        if not is_public_key(request.public_key) or self._broker.has_key(request.public_key):
            return "the key is invalid or in use by another peer: join again, which creates a new key"
        try:
            check_name(name)
        except UserError as error:
            return str(error)
        return f"there is already a peer named {name}: choose another --name" if name in self._taken else ""

    def _free_name(self) -> str:
        taken = self._taken
        return next(name for number in range(1 << 30) if (name := f"p{number}") not in taken)

    @property
    def _taken(self) -> set[str]:
        return {*self._broker.peers, *self._broker.invites, *(offer.name for offer in self._offers.values())}
