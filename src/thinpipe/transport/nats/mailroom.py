"""All channels of one process: what to send when something is given, expected, or has come. Pure, like its channels."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from thinpipe.transport.labels import Label
from thinpipe.transport.nats.channel import WINDOW_NBYTES, Done, Inbox, Outbox
from thinpipe.transport.nats.frame import CREDIT, Header, Origin, ProtocolError

MOST_HELD_WINDOWS = 8
"""All that may wait here from one peer, in windows: one that invents tags is stopped by it."""
MOST_TAGS = 4096


class Letter(NamedTuple):
    """A frame to send; `done` is to be called when it has left."""

    to: str
    frame: bytes
    done: Done | None = None
    is_credit: bool = False


class Mailroom:
    """`peers` are the others and the life that each is in. Not safe for threads: its owner takes turns."""

    def __init__(self, origin: Origin, peers: Mapping[str, int], *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._peers, self._window = origin, peers, window
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._inboxes: dict[str, dict[int, Inbox]] = {peer: {} for peer in peers}
        self._labels: dict[int, Label] = {}
        self.stale = 0
        """Frames of other epochs, of earlier lives of a peer, or of one who is not in this epoch: dropped."""

    def label(self, tag: int, label: Label) -> None:
        """What is sent and expected on this tag from now on."""
        self._labels[tag] = label

    def send(self, to: str, tag: int, data: memoryview, done: Done) -> Iterator[Letter]:
        outbox = self._outboxes.setdefault((to, tag), Outbox(self._origin, tag, window=self._window))
        outbox.add(data, self._labels.get(tag, Label()), done)
        return self._leaving(to, outbox)

    def expect(self, sender: str, tag: int, buffer: memoryview, done: Done) -> Iterator[Letter]:
        inbox = self._inbox(sender, tag)
        try:
            inbox.expect(buffer, self._labels.get(tag, Label()), done)
        except ProtocolError as error:
            raise ProtocolError(f"peer {sender}: {error}") from None
        return self._credit(sender, inbox)

    def arrived(self, sender: str, data: bytes) -> Iterator[Letter]:
        """Raises ProtocolError, with the peer's name, for anything but what must come next."""
        try:
            return self._take(sender, data)
        except ProtocolError as error:
            raise ProtocolError(f"peer {sender}: {error}") from None

    def _take(self, sender: str, data: bytes) -> Iterator[Letter]:
        if sender not in self._peers:
            self.stale += 1  # one who was given up and does not know it yet: it must not disturb those who go on
            return iter(())
        header, payload = Header.unpack(data)
        if header.origin.run != self._origin.run:
            raise ProtocolError("a message of another run")
        if (header.origin.epoch, header.origin.incarnation) != (self._origin.epoch, self._peers[sender]):
            self.stale += 1
            return iter(())
        if header.kind == CREDIT:
            outbox = self._outboxes.get((sender, header.tag))
            if outbox is None:
                raise ProtocolError(f"credit for tag {header.tag}, on which nothing was sent")
            outbox.grant(header.sequence)
            return self._leaving(sender, outbox)
        inbox = self._inbox(sender, header.tag)
        inbox.arrive(header, payload)
        if self.held_from(sender) > MOST_HELD_WINDOWS * self._window:
            raise ProtocolError(f"{self.held_from(sender)} bytes that nobody asked for")
        return self._credit(sender, inbox)

    def _leaving(self, to: str, outbox: Outbox) -> Iterator[Letter]:
        return (Letter(to, frame, done) for frame, done in outbox.frames())

    def _credit(self, sender: str, inbox: Inbox) -> Iterator[Letter]:
        credit = inbox.credit()
        return iter(() if credit is None else (Letter(sender, credit, is_credit=True),))

    def _inbox(self, sender: str, tag: int) -> Inbox:
        inboxes = self._inboxes[sender]
        if tag not in inboxes:
            if len(inboxes) == MOST_TAGS:
                raise ProtocolError(f"more than {MOST_TAGS} tags")
            inboxes[tag] = Inbox(self._origin, tag, window=self._window)
        return inboxes[tag]

    def held_from(self, sender: str) -> int:
        """Bytes that have come and wait for a receive."""
        return sum(inbox.held_nbytes for inbox in self._inboxes[sender].values())

    @property
    def held_nbytes(self) -> int:
        """That wait here for a receive, or for credit."""
        waiting = sum(outbox.held_nbytes for outbox in self._outboxes.values())
        return waiting + sum(map(self.held_from, self._peers))
