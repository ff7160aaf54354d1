"""A member of a run that speaks the protocol by hand and says what it likes: the kit of the attacks in this folder.

The adversary has what every member has, a name and a key that an invite gave it, and connects to a real hub with a real
server. An attack is a few calls: `Adversary.say` and `ask` send any bytes to a service of the hub, `tell` to another
peer, `send_raw` writes a message of NATS's own protocol, headers included.
"""

import secrets
from contextlib import suppress

import msgspec

from tests.programs import PATIENCE
from tests.swarm.hubs import report
from thinpipe.core.numerics import numerics
from thinpipe.swarm.peer.accept_invite import accept_invite
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import Answer, Assignment, EventReport, Measure, NextRequest
from thinpipe.transport.nats.connection import Address, HubConnection

MALFORMED_HEADERS = {
    "short": b"NATS/1.0",
    "no status": b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    "no text": b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n",
    "no line": b"NATS/1.0\r\n:\r\n\r\n",
}
"""Headers that the NATS server passes on and that are no headers."""


class Stranger:
    """Holder of an invite who has not joined."""

    def __init__(self, invite):
        self._connect(
            Address(url=invite.url, fingerprint=invite.fingerprint, name=invite.id, credentials=invite.credentials)
        )

    def _connect(self, address):
        self.name, self.incarnation = address.name, secrets.token_hex(8)
        self.connection = HubConnection(address, incarnation=self.incarnation)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        with suppress(ConnectionError, TimeoutError):
            self.connection.close()

    def send_raw(self, subject, header, body=b""):
        """A message with headers, as bytes on the socket."""
        sizes = f"HPUB {subject} {len(header)} {len(header) + len(body)}\r\n".encode()
        write = self.connection._urgent.client._transport.write
        self.connection._loop.call_soon_threadsafe(write, sizes + header + body + b"\r\n")


class Adversary(Stranger):
    """A member, which has joined with an invite."""

    def __init__(self, invite, folder, name="mallory"):
        self.generation = 0
        self._connect(accept_invite(Invite.read(invite), folder / name, name=name, numerics=numerics()).address)

    def say(self, service, data):
        """To a service of the hub, which need not answer."""
        self.connection.publish(service, _encoded(data))

    def ask(self, service, data, seconds=PATIENCE):
        return self.connection.request(service, _encoded(data), seconds=seconds)

    def tell(self, peer, kind, data):
        """To another peer."""
        self.connection.send(peer, kind, data, urgent=True)

    def next(self, seconds=PATIENCE, **fields):
        """What the hub wants this peer to do next."""
        answer = msgspec.msgpack.decode(self.ask("next", self.request(**fields), seconds), type=Answer)
        if isinstance(answer, Assignment):
            self.generation = answer.generation
        return answer

    def request(self, **fields):
        """Asks what to do next, and reports something."""
        return NextRequest(
            **{"incarnation": self.incarnation, "numerics": numerics(), "left_generation": self.generation} | fields
        )

    def until_assigned(self, **figures):
        """Waits for a part of a generation, as a peer whose machine has these figures."""
        measured, rates = report(**figures), None
        while not isinstance(answer := self.next(report=measured, concurrent_bps=rates), Assignment):
            rates = (1e9, 1e9) if isinstance(answer, Measure) and answer.concurrent else None
        return answer

    def report_event(self, event):
        self.say("event", EventReport(generation=self.generation, event=msgspec.json.encode(event)))


def _encoded(data):
    return data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
