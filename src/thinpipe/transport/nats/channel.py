"""One direction of mail between two peers on one tag: pieces in order, and credit so that nobody drowns.

The sender may be `window` bytes ahead of what the receiver has taken. So neither the receiver nor the server between
them ever holds more than that, however slow the receiver is. Pure: no sockets, no threads, no clocks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinpipe.transport.labels import Label
from thinpipe.transport.nats.frame import CREDIT, PIECE, Header, Origin, ProtocolError

PIECE_NBYTES = 1 << 20
"""Larger messages travel in pieces: a server takes so much at once, and a megabyte costs nothing."""
WINDOW_NBYTES = 16 << 20
"""More than a line of 1 Gbit/s has under way in 100 ms. At least four pieces, or credit may come too late."""

Done = Callable[[], None]


@dataclass
class _Leaving:
    label: Label
    data: memoryview
    done: Done
    sent: int = 0


class Outbox:
    """What waits to be sent on one tag to one peer."""

    def __init__(self, origin: Origin, tag: int, *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._tag, self._window = origin, tag, window
        self._waiting: deque[_Leaving] = deque()
        self._pieces = self._sent = 0
        self._granted = window

    def add(self, data: memoryview, label: Label, done: Done) -> None:
        """`done` is called when the last piece has been given to `frames`."""
        self._waiting.append(_Leaving(label, data, done))

    def grant(self, total: int) -> None:
        if not self._granted <= total <= self._sent + self._window:
            raise ProtocolError(f"credit for {total} bytes on tag {self._tag}, of which {self._sent} were sent")
        self._granted = total

    def frames(self) -> Iterator[tuple[bytes, Done | None]]:
        """As many as credit allows now; with the last piece of a message, what to call when it has left."""
        while self._waiting:
            message = self._waiting[0]
            piece = message.data[message.sent : message.sent + PIECE_NBYTES]
            if self._sent + len(piece) > self._granted:
                return
            header = Header(
                kind=PIECE,
                origin=self._origin,
                label=message.label,
                tag=self._tag,
                sequence=self._pieces,
                length=len(message.data),
                offset=message.sent,
            )
            message.sent += len(piece)
            self._pieces += 1
            self._sent += len(piece)
            ends = message.sent == len(message.data)
            if ends:
                self._waiting.popleft()
            yield header.pack(piece), message.done if ends else None

    @property
    def held_nbytes(self) -> int:
        return sum(len(message.data) - message.sent for message in self._waiting)


@dataclass
class _Expected:
    buffer: memoryview
    label: Label
    done: Done
    filled: int = 0


class Inbox:
    """What has come on one tag from one peer, and what is expected."""

    def __init__(self, origin: Origin, tag: int, *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._tag, self._window = origin, tag, window
        self._expected: deque[_Expected] = deque()
        self._arrived: deque[tuple[Header, memoryview]] = deque()
        self._pieces = self._taken = self._held = 0
        self._granted = window

    def expect(self, buffer: memoryview, label: Label, done: Done) -> None:
        """The next message goes here; `done` is called when it is whole."""
        self._expected.append(_Expected(buffer, label, done))
        self._match()

    def arrive(self, header: Header, payload: memoryview) -> None:
        if header.sequence != self._pieces:
            raise ProtocolError(
                f"piece {header.sequence} on tag {self._tag} where {self._pieces} was next: some are lost"
            )
        self._pieces += 1
        self._held += len(payload)
        if self._taken + self._held > self._granted:
            raise ProtocolError(f"more bytes on tag {self._tag} than there was credit for")
        self._arrived.append((header, payload))
        self._match()

    def _match(self) -> None:
        while self._expected and self._arrived:
            wanted, (header, payload) = self._expected[0], self._arrived.popleft()
            self._compare(wanted, header)
            wanted.buffer[wanted.filled : wanted.filled + len(payload)] = payload
            wanted.filled += len(payload)
            self._held -= len(payload)
            self._taken += len(payload)
            if wanted.filled == len(wanted.buffer):
                self._expected.popleft()
                wanted.done()

    def _compare(self, wanted: _Expected, header: Header) -> None:
        if header.length != len(wanted.buffer) or header.offset != wanted.filled:
            raise ProtocolError(
                f"byte {header.offset} of a message of {header.length} on tag {self._tag}, where byte {wanted.filled} "
                f"of one of {len(wanted.buffer)} was next"
            )
        if header.label != wanted.label:
            raise ProtocolError(f"a message of {header.label} on tag {self._tag}, where {wanted.label} was next")

    def credit(self) -> bytes | None:
        """To tell the sender, when enough was taken since the last time."""
        if self._taken + self._window - self._granted < self._window // 4:
            return None
        self._granted = self._taken + self._window
        header = Header(kind=CREDIT, origin=self._origin, label=Label(), tag=self._tag, sequence=self._granted)
        return header.pack()

    @property
    def held_nbytes(self) -> int:
        """That wait for a receive."""
        return self._held
