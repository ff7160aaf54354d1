"""Ordered, chunked byte stream for one (peer, tag) with credit-based flow control.

The sender may be at most `window` bytes ahead of what the receiver has consumed, so neither the receiver nor the server
buffers more than that, however slow the receiver is. Pure logic: no sockets, threads or clocks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinpipe.core.foreign import ProtocolError
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.frame import CREDIT, PIECE, Header, Origin

PIECE_NBYTES = 1 << 20
"""Maximum payload of a frame; larger messages are split. Limited by the server's maximum payload; at 1 MiB the
overhead of headers is negligible."""
WINDOW_NBYTES = 16 << 20
"""Default flow-control window in bytes: more than the bandwidth-delay product of a 1 Gbit/s link with 100 ms. A window
must hold at least four pieces, or credit may arrive too late."""
_PIECE_OVERHEAD_NBYTES = 500
"""Memory of a piece that waits, besides its content."""

OnDone = Callable[[], None]


@dataclass
class _OutgoingMessage:
    label: Label
    data: memoryview
    done: OnDone
    sent: int = 0


class SendStream:
    """Sending end: messages queued for one peer on one tag."""

    def __init__(self, origin: Origin, tag: int, *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._tag, self._window = origin, tag, window
        self._waiting: deque[_OutgoingMessage] = deque()
        self._pieces = self._sent = 0
        self._granted = window

    def add(self, data: memoryview, label: Label, done: OnDone) -> None:
        """Queues a message. `data` is not copied; `done` is returned by `frames` along with the last piece."""
        self._waiting.append(_OutgoingMessage(label, data, done))

    def grant(self, total: int) -> None:
        """Handles credit: the stream may send up to `total` bytes, counted from its start."""
        if not self._granted < total <= self._sent + self._window:
            raise ProtocolError(f"credit for {total} bytes on tag {self._tag}, of which {self._sent} were sent")
        self._granted = total

    def frames(self) -> Iterator[tuple[bytes, OnDone | None]]:
        """Frames that credit allows now; the last piece of a message comes with the callback to run once it is sent."""
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
        """Bytes that wait for credit."""
        return sum(len(message.data) - message.sent for message in self._waiting)


@dataclass
class _ExpectedMessage:
    buffer: memoryview
    label: Label
    done: OnDone
    filled: int = 0


class ReceiveStream:
    """Receiving end: pieces that arrived from one peer on one tag, and posted receives."""

    def __init__(self, origin: Origin, tag: int, *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._tag, self._window = origin, tag, window
        self._expected: deque[_ExpectedMessage] = deque()
        self._arrived: deque[tuple[Header, memoryview]] = deque()
        self._pieces = self._taken = self._held = 0
        self._granted = window

    def expect(self, buffer: memoryview, label: Label, done: OnDone) -> None:
        """Posts a receive: the next message fills `buffer`; `done` is called when it is complete."""
        self._expected.append(_ExpectedMessage(buffer, label, done))
        self._match()

    def arrive(self, header: Header, payload: memoryview) -> None:
        """Handles a piece. Raises ProtocolError if it is out of order, beyond the credit or not what was expected."""
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

    def _compare(self, wanted: _ExpectedMessage, header: Header) -> None:
        if header.length != len(wanted.buffer) or header.offset != wanted.filled:
            raise ProtocolError(
                f"byte {header.offset} of a message of {header.length} on tag {self._tag}, where byte {wanted.filled} "
                f"of one of {len(wanted.buffer)} was next"
            )
        if header.label != wanted.label:
            raise ProtocolError(f"a message of {header.label} on tag {self._tag}, where {wanted.label} was next")

    def credit(self) -> bytes | None:
        """A credit frame for the sender, once a quarter of the window was consumed since the last one; else None."""
        if self._taken + self._window - self._granted < self._window // 4:
            return None
        self._granted = self._taken + self._window
        header = Header(kind=CREDIT, origin=self._origin, label=Label(), tag=self._tag, sequence=self._granted)
        return header.pack()

    @property
    def held_nbytes(self) -> int:
        """Bytes that have arrived and wait for a receive."""
        return self._held

    @property
    def occupied_nbytes(self) -> int:
        """Memory of what waits for a receive, also of pieces without content."""
        return self._held + _PIECE_OVERHEAD_NBYTES * len(self._arrived)
