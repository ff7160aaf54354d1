"""Closes connections that do not read, where more waits for them at the server than it may hold for one member.

nats-server bounds what waits for one connection (`broker.config.Limits`), but not how many a key opens: what the hub
answers to one goes to all that listen, and a few of them that read nothing would fill the memory of the hub's machine.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from thinpipe.core.bounds import Count, Nbytes, Text
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.core.units import format_bytes
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.broker.config import Limits

_LOG = logging.getLogger(__name__)
_CHECK_SECONDS = 0.5
_NOWHERE = "_INBOX.disconnects.nowhere"
_REQUEST_TIMEOUT_SECONDS = 5
_FEW, _MANY = 64, 2048
"""Connections, those with most waiting first, that the server is asked for; many where all of the few have some."""


class _Connection(msgspec.Struct):
    cid: Count
    """Number of the connection at the server."""
    authorized_user: Text = ""
    """Public key of the client."""
    pending_bytes: Nbytes = 0
    """Bytes that wait at the server until the client reads."""


class _Connections(msgspec.Struct):
    server_id: Text
    connections: Annotated[list[_Connection], msgspec.Meta(max_length=_MANY)] = []


class WaitingBytes(msgspec.Struct):
    """Reply of nats-server to a CONNZ request; other fields are ignored."""

    data: _Connections


class SlowReaders:
    """`tell_owner` prints a line for the hub's owner: once for each member or invite."""

    def __init__(
        self, broker: Broker, tell_owner: Callable[[str], None], *, max_nbytes: int = Limits().pending_nbytes
    ) -> None:
        """`max_nbytes`: that may wait for all connections of one key."""
        self._broker, self._tell_owner, self._max_nbytes = broker, tell_owner, max_nbytes
        self._named: set[str] = set()

    async def watch(self, client: Client) -> None:
        """Checks until cancelled, on a connection to the server's system account."""
        asked, task = _FEW, asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # before Python 3.12 `wait_for` swallows a cancellation if the reply is there
            try:
                asked = await self._check(client, asked)
            except (NatsError, ProtocolError, OSError) as error:
                _LOG.warning("nats-server did not say what waits for its connections: %s", error)
                asked = _FEW
            if asked == _FEW:
                await asyncio.sleep(_CHECK_SECONDS)

    async def _check(self, client: Client, asked: int) -> int:
        """Returns how many connections to ask for next."""
        question = json.dumps({"auth": True, "sort": "pending", "limit": asked}).encode()
        subject = f"$SYS.REQ.ACCOUNT.{self._broker.authority.account}.CONNZ"
        reply = await client.request(subject, question, timeout=_REQUEST_TIMEOUT_SECONDS)
        found = decode_foreign(reply.data, WaitingBytes, form="json").data
        waiting = defaultdict[str, list[_Connection]](list)
        for connection in found.connections:
            if connection.pending_bytes:
                waiting[connection.authorized_user].append(connection)
        for key, connections in waiting.items():
            nbytes = sum(connection.pending_bytes for connection in connections)
            if nbytes > self._max_nbytes and (name := self._name_of(key)):
                self._announce(name, len(connections), nbytes)
                kick = f"$SYS.REQ.SERVER.{found.server_id}.KICK"
                for connection in connections:  # without a reply subject the server ignores it
                    await client.publish(kick, json.dumps({"cid": connection.cid}).encode(), reply=_NOWHERE)
        is_full = asked == _FEW and sum(map(len, waiting.values())) == _FEW
        return _MANY if is_full else _FEW

    def _name_of(self, key: str) -> str:
        """Name of the member with this key, or id of the invite; empty: the key is the hub's own."""
        invites = (identity for identity, invite in self._broker.invites.items() if invite.public_key == key)
        return self._broker.name_of(key) or next(invites, "")

    def _announce(self, name: str, count: int, nbytes: int) -> None:
        text = (
            f"{count} connections of {name} do not read the {format_bytes(nbytes)} that wait for them: they are closed"
        )
        _LOG.warning("%s", text)
        if name not in self._named:
            self._named.add(name)
            self._tell_owner(f"{text}. If this goes on, remove it with `thinpipe kick` or `thinpipe invite --revoke`")
