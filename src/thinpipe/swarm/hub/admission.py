"""Admission of new peers: who has an invite has a key of its own entered as a member, and gets JWTs for it.

A newcomer asks once, and may ask again for as long as it likes: the hub enters its key before it answers, and a key
that it knows already has the same answer. So whichever message is lost, and whichever side dies, nobody is left half
in. Before joining, an invite's holder may ask whether the invite is good and probe its link, which does not use it up.
"""

import asyncio
from collections.abc import Callable

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.core.numerics import Numerics, numerics_mismatch
from thinpipe.core.units import utc_text
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.broker.register import IssuedInvite
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.services.serve import Services
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.keys import is_public_key
from thinpipe.swarm.protocol.messages import MAX_LINES, InviteCheck, InviteState, JoinAnswer, JoinRequest, RenewReply
from thinpipe.swarm.protocol.names import JOIN, check_name
from thinpipe.swarm.protocol.probe import probe_service
from thinpipe.transport.nats.direct_client import DirectClient


class Admission:
    """Handles join requests and renewals. `numerics`: what newcomers must match. `print_line` prints a line for the
    hub's owner."""

    def __init__(
        self,
        broker: Broker,
        options: HubOptions,
        *,
        numerics: Numerics,
        print_line: Callable[[str], None],
        who_reads: str = "",
    ) -> None:
        """`who_reads`: who can read the data, in one sentence, announced to everybody before joining."""
        self._broker, self._options, self._numerics, self._print = broker, options, numerics, print_line
        self._who_reads = who_reads
        self._services, self._one_by_one = Services({JOIN: self._serve}, print_line), asyncio.Lock()

    async def open(self, client: DirectClient) -> None:
        """Starts to serve holders of invites on the hub's connection, within the budget of the service."""
        await self._services.open(client, self._broker.invites)

    async def update(self) -> None:
        """Serves the holders of the invites that there are now."""
        await self._services.set_peers(self._broker.invites)

    def troubles(self) -> list[str]:
        """Holders of invites that flood, in words."""
        return self._services.troubles()

    async def invite(self, *, for_name: str = "") -> Invite:
        """Creates a new invite, for one newcomer. `for_name`: one of the names that are kept for the hub's owner."""
        options = self._options
        made = await asyncio.to_thread(
            self._broker.add_invite,
            url=options.public_url,
            run=options.run,
            seconds=options.invite_seconds,
            for_name=for_name,
        )
        await self.update()
        return made

    async def revoke(self, identity: str) -> str:
        """Revokes an open invite; says so in words. Raises UserError or BrokerError."""
        try:
            await asyncio.to_thread(self._broker.revoke_invite, identity)
        finally:
            await self.update()
        return f"the invite {identity} was revoked"

    def open_invites(self) -> list[str]:
        """Invites that can be used, a line for each, the first to end first."""
        now = self._broker.clock()
        known = [(each.expires_s, name) for name, each in self._broker.invites.items() if not each.used_by]
        ends = sorted(entry for entry in known if entry[0] > now)
        lines = [f"{name}: until {utc_text(end)}, another {(end - now) / 3600:.1f} h" for end, name in ends]
        return lines[:MAX_LINES] or ["no invite is open"]

    def numerics_mismatch(self, numerics: Numerics) -> str:
        """Why a peer with these numerics cannot take part; empty if it can."""
        return sanitize(numerics_mismatch(numerics, self._numerics))

    def renew(self, peer: str) -> RenewReply | None:
        """A new JWT for a member's key; None: there is no such member."""
        public_key = self._broker.peers.get(peer)
        if public_key is None:
            return None
        return RenewReply(jwt=self._broker.authority.peer_jwt(peer, public_key), time_s=self._broker.clock())

    async def _serve(self, identity: str, data: bytes) -> bytes | None:
        """Answers what an invite's holder asks: to be admitted, whether it could be, or a probe of its link."""
        invite = self._broker.invites.get(identity)
        if invite is None:
            return None
        try:
            request = decode_foreign(data, JoinRequest)
        except ProtocolError:
            return await self._check_or_probe(identity, invite, data)
        async with self._one_by_one:  # else two would be offered the same name, or use the same invite
            invite = self._broker.invites.get(identity)
            return None if invite is None else msgspec.msgpack.encode(await self._answer(identity, invite, request))

    async def _check_or_probe(self, identity: str, invite: IssuedInvite, data: bytes) -> bytes:
        try:
            asked = decode_foreign(data, InviteCheck).numerics
        except ProtocolError:
            return await probe_service(identity, data)
        return msgspec.msgpack.encode(
            InviteState(
                refusal=self._why_over(invite) if asked is None else self.numerics_mismatch(asked),
                expires_s=invite.expires_s,
                time_s=self._broker.clock(),
                who_reads=self._who_reads,
            )
        )

    async def _answer(self, identity: str, invite: IssuedInvite, request: JoinRequest) -> JoinAnswer:
        """Admits a newcomer, or refuses it. A member has its JWTs again, with whichever invite: they are of no use to
        anybody without its key."""
        key, authority = request.public_key, self._broker.authority
        name = self._broker.name_of(key)
        if name is None:
            name = invite.for_name or request.name or self._free_name()
            refusal = (
                self._why_over(invite) or self._refusal(invite, request, name) or await self._admit(identity, name, key)
            )
            if refusal:
                return JoinAnswer(refusal=refusal, time_s=self._broker.clock())
        return JoinAnswer(
            name=name,
            jwt=authority.peer_jwt(name, key),
            renewal=authority.renewal_jwt(name, key),
            time_s=self._broker.clock(),
        )

    async def _admit(self, identity: str, name: str, public_key: str) -> str:
        """Enters a member on disk; returns why that fails, if it does."""
        try:
            await asyncio.to_thread(self._broker.add_peer, name, public_key, invite=identity)
        except (UserError, OSError) as error:
            self._print(f"{name} could not be admitted: {error}")
            return f"the hub cannot enter a new member now ({error}); the invite still works"
        self._print(f"{name} was admitted with an invite")
        return ""

    def _why_over(self, invite: IssuedInvite) -> str:
        """Why an invite cannot be used by anybody new; empty if it can."""
        now = self._broker.clock()
        if invite.used_by:
            return (
                f"this invite was used before, by {invite.used_by}: whoever that is joins again with the folder of the "
                "first time, anybody else asks for a new invite"
            )
        if now >= invite.expires_s:
            end, clock = utc_text(invite.expires_s), utc_text(now)
            return f"this invite could be used until {end}, and the hub's clock says {clock}: ask for a new one"
        return ""

    def _refusal(self, invite: IssuedInvite, request: JoinRequest, name: str) -> str:
        if mismatch := self.numerics_mismatch(request.numerics):
            return mismatch
        if not is_public_key(request.public_key) or not self._broker.may_join(request.public_key):
            return (
                "the key is invalid, in use or was removed from the run: join in a new --folder, which makes a new key"
            )
        try:
            check_name(name)
        except UserError as error:
            return str(error)
        if request.name not in ("", name):
            return f"this invite is for the machine {name}: leave --name out"
        if name in self._options.keep_ends and not invite.for_name:
            return f"the name {name} is kept for a machine of the hub's owner (hub.keep_ends): choose another --name"
        taken = name in self._broker.peers or name in self._broker.invites
        return f"there is already a peer named {name}: choose another --name" if taken else ""

    def _free_name(self) -> str:
        peers, invites = self._broker.peers, self._broker.invites
        known = {*peers, *invites, *self._options.keep_ends}
        return next(name for n in range(1 << 30) if (name := f"p{n}") not in known)
