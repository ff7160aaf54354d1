"""Flow control of all streams of one process: maps sends, receives and incoming frames to the frames to send next.

Pure logic, like `streams`: no sockets, threads or clocks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from thinpipe.core.foreign import ProtocolError
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.frame import CREDIT, Header, Origin
from thinpipe.transport.nats.streams import WINDOW_NBYTES, OnDone, ReceiveStream, SendStream

MAX_HELD_WINDOWS = 8
"""Limit for unclaimed bytes from one peer over all tags, in windows; stops a peer that invents tags."""
MAX_TAGS = 4096
"""Limit for the number of tags on which one peer is received."""


class OutgoingFrame(NamedTuple):
    """A frame to send to peer `to`; call `done` once it is sent."""

    to: str
    frame: bytes
    done: OnDone | None = None
    is_credit: bool = False


class FlowControl:
    """Streams of one process in one generation. `peers`: incarnation number of each peer, by name. Not thread-safe."""

    def __init__(self, origin: Origin, peers: Mapping[str, int], *, window: int = WINDOW_NBYTES) -> None:
        self._origin, self._peers, self._window = origin, peers, window
        self._send_streams: dict[tuple[str, int], SendStream] = {}
        self._receive_streams: dict[str, dict[int, ReceiveStream]] = {peer: {} for peer in peers}
        self._labels: dict[int, Label] = {}
        self.stale = 0
        """Number of dropped frames: of other generations, other incarnations of a peer, or non-member peers."""
        self._stale_nbytes: Counter[str] = Counter()

    def label(self, tag: int, label: Label) -> None:
        """Sets the label of all following sends and receives on `tag`."""
        self._labels[tag] = label

    def send(self, to: str, tag: int, data: memoryview, done: OnDone) -> Iterator[OutgoingFrame]:
        """Queues a message; returns the frames that can be sent now."""
        send_stream = self._send_streams.setdefault((to, tag), SendStream(self._origin, tag, window=self._window))
        send_stream.add(data, self._labels.get(tag, Label()), done)
        return self._outgoing_frames(to, send_stream)

    def expect(self, sender: str, tag: int, buffer: memoryview, done: OnDone) -> Iterator[OutgoingFrame]:
        """Posts a receive; returns a credit frame if one is due."""
        receive_stream = self._receive_stream(sender, tag)
        try:
            receive_stream.expect(buffer, self._labels.get(tag, Label()), done)
        except ProtocolError as error:
            raise ProtocolError(f"peer {sender}: {error}") from None
        return self._credit(sender, receive_stream)

    def arrived(self, sender: str, data: bytes) -> Iterator[OutgoingFrame]:
        """Handles an incoming frame; returns the frames to send in response.

        Raises ProtocolError, naming the peer, for any frame but the expected next one.
        """
        try:
            return self._take(sender, data)
        except ProtocolError as error:
            raise ProtocolError(f"peer {sender}: {error}") from None

    def _take(self, sender: str, data: bytes) -> Iterator[OutgoingFrame]:
        if sender not in self._peers:
            self.stale += 1  # a removed peer that does not know yet must not disturb the others
            return iter(())
        header, payload = Header.unpack(data)
        if header.origin.run != self._origin.run:
            raise ProtocolError("a message of another run")
        if (header.origin.generation, header.origin.incarnation) != (self._origin.generation, self._peers[sender]):
            self._on_stale(sender, len(data))
            return iter(())
        if header.kind == CREDIT:
            send_stream = self._send_streams.get((sender, header.tag))
            if send_stream is None:
                raise ProtocolError(f"credit for tag {header.tag}, on which nothing was sent")
            send_stream.grant(header.sequence)
            return self._outgoing_frames(sender, send_stream)
        receive_stream = self._receive_stream(sender, header.tag)
        receive_stream.arrive(header, payload)
        if self._occupied_by(sender) > MAX_HELD_WINDOWS * self._window:
            raise ProtocolError(f"{self._occupied_by(sender)} bytes that nobody asked for")
        return self._credit(sender, receive_stream)

    def _on_stale(self, sender: str, nbytes: int) -> None:
        """Counts a frame of an earlier generation or incarnation: credit allows no more to be in flight."""
        self.stale += 1
        self._stale_nbytes[sender] += nbytes
        if self._stale_nbytes[sender] > MAX_HELD_WINDOWS * self._window:
            raise ProtocolError(f"{self._stale_nbytes[sender]} bytes of another generation: it floods this machine")

    def _outgoing_frames(self, to: str, send_stream: SendStream) -> Iterator[OutgoingFrame]:
        return (OutgoingFrame(to, frame, done) for frame, done in send_stream.frames())

    def _credit(self, sender: str, receive_stream: ReceiveStream) -> Iterator[OutgoingFrame]:
        credit = receive_stream.credit()
        return iter(() if credit is None else (OutgoingFrame(sender, credit, is_credit=True),))

    def _receive_stream(self, sender: str, tag: int) -> ReceiveStream:
        streams = self._receive_streams[sender]
        if tag not in streams:
            if len(streams) == MAX_TAGS:
                raise ProtocolError(f"more than {MAX_TAGS} tags")
            streams[tag] = ReceiveStream(self._origin, tag, window=self._window)
        return streams[tag]

    def held_from(self, sender: str) -> int:
        """Bytes from one peer that wait for a receive."""
        return sum(receive_stream.held_nbytes for receive_stream in self._receive_streams[sender].values())

    def _occupied_by(self, sender: str) -> int:
        """Memory of the pieces from one peer that wait for a receive, in bytes."""
        return sum(receive_stream.occupied_nbytes for receive_stream in self._receive_streams[sender].values())

    @property
    def held_nbytes(self) -> int:
        """Bytes in this process that wait for a receive or for credit."""
        waiting = sum(send_stream.held_nbytes for send_stream in self._send_streams.values())
        return waiting + sum(map(self.held_from, self._peers))
