"""Who comes in: a newcomer exchanges the key of an invite, which works once, for one of its own.

In two steps, since the server cuts the invite's connection as soon as the invite is used up. First the newcomer is told
its name; then it says that it has heard it, and is let in. Whatever is lost on the way, it can ask again, or is in.
Before that it may measure its line, which uses nothing up.
"""

import asyncio
import secrets
from collections.abc import Callable

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import Numerics, why_other_numbers
from thinpipe.swarm.broker import Broker, BrokerError
from thinpipe.swarm.broker_config import check_name
from thinpipe.swarm.invite import Invite
from thinpipe.swarm.keys import KeyPair, is_public_key
from thinpipe.swarm.line_test import line_service
from thinpipe.swarm.messages import JoinAnswer, JoinRequest
from thinpipe.swarm.reading import read, say

_REQUESTS = msgspec.msgpack.Decoder(JoinRequest)


class Gate:
    """`numerics`: what newcomers must compute by. `tell` is given lines for the person who runs the hub."""

    def __init__(
        self, broker: Broker, *, run: str, public_url: str, numerics: Numerics, tell: Callable[[str], None]
    ) -> None:
        self._broker, self._run, self._url, self._numerics, self._tell = broker, run, public_url, numerics, tell
        self._promised: dict[str, JoinRequest] = {}
        """By invite: the newcomer's last request, with the name that it was told."""

    async def open(self, client: Client) -> None:
        self._client = client
        await client.subscribe("join.*", cb=self._asked)
        await client.flush(timeout=10)

    async def invite(self) -> Invite:
        """A new one, for one newcomer."""
        pair, identity = KeyPair.new(), f"i{secrets.token_hex(6)}"
        await asyncio.to_thread(self._broker.add_invite, identity, pair.public_key)
        return Invite(url=self._url, run=self._run, fingerprint=self._broker.fingerprint, id=identity, seed=pair.seed)

    def why_other_numbers(self, numerics: Numerics) -> str:
        """Why somebody who computes by these cannot take part; empty if it can."""
        return say(why_other_numbers(numerics, self._numerics))

    async def _asked(self, message: Msg) -> None:
        invite, request = message.subject.split(".")[1], read(_REQUESTS, message.data)
        if not message.reply.startswith(f"_INBOX.{invite}.") or invite not in self._broker.invites:
            return
        if request is None:
            if (noise := await line_service(invite, message.data)) is not None:
                await self._client.publish(message.reply, noise)
        elif request.heard and request == self._promised.get(invite):
            await self._admit(invite, request)
        else:
            await self._client.publish(message.reply, msgspec.msgpack.encode(self._promise(invite, request)))

    def _promise(self, invite: str, request: JoinRequest) -> JoinAnswer:
        self._promised.pop(invite, None)
        name = request.name or self._free_name()
        refusal = self._why_not(request, name)
        if refusal:
            return JoinAnswer(refusal=refusal)
        self._promised[invite] = msgspec.structs.replace(request, name=name, heard=True)
        return JoinAnswer(name=name)

    async def _admit(self, invite: str, request: JoinRequest) -> None:
        """The client calls back for one message after the other: nobody else asks meanwhile."""
        try:
            await asyncio.to_thread(self._broker.admit, invite, request.name, request.public_key)
        except (UserError, BrokerError) as error:  # raised from here, it would end the hub's connection
            self._tell(f"{request.name} could not join: {error}")
        else:
            self._tell(f"{request.name} has joined")
        finally:
            self._promised.pop(invite, None)

    def _why_not(self, request: JoinRequest, name: str) -> str:
        if other := self.why_other_numbers(request.numerics):
            return other
        if not is_public_key(request.public_key) or self._broker.knows(request.public_key):
            return "this key cannot be used: make a new one"
        try:
            check_name(name)
        except UserError as error:
            return str(error)
        return f"there is a peer {name} already: choose another --name" if name in self._taken else ""

    def _free_name(self) -> str:
        taken = self._taken
        return next(name for number in range(1 << 30) if (name := f"p{number}") not in taken)

    @property
    def _taken(self) -> set[str]:
        return {*self._broker.peers, *self._broker.invites, *(promise.name for promise in self._promised.values())}
