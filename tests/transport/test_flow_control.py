"""Mail between two rooms: in order, whole, within its credit; and nothing but a ProtocolError for anything else."""

import random
import tracemalloc
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinpipe.core.foreign import ProtocolError
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.flow_control import FlowControl
from thinpipe.transport.nats.frame import CREDIT, HEADER_NBYTES, PIECE, Header, Origin
from thinpipe.transport.nats.streams import PIECE_NBYTES

RUN = Origin(run=b"run-0001", generation=3)
WINDOW = 4 * PIECE_NBYTES


def flow_controls(window=WINDOW):
    return FlowControl(RUN, {"b": 0}, window=window), FlowControl(RUN, {"a": 0}, window=window)


class Wire:
    """Carries frames in both directions, each direction in order, as a server does."""

    def __init__(self, a, b):
        self.flow_controls, self.in_flight, self.max_nbytes = {"a": a, "b": b}, {"a": deque(), "b": deque()}, 0

    def put(self, frames):
        for outgoing in frames:
            self.in_flight[outgoing.to].append(outgoing)
            if outgoing.done:
                outgoing.done()
        self.max_nbytes = max(
            self.max_nbytes, sum(len(outgoing.frame) for waiting in self.in_flight.values() for outgoing in waiting)
        )

    def deliver(self, to):
        outgoing = self.in_flight[to].popleft()
        self.put(self.flow_controls[to].arrived("a" if to == "b" else "b", outgoing.frame))

    def run(self, pick=lambda waiting: waiting[0]):
        while waiting := [to for to, frames in self.in_flight.items() if frames]:
            self.deliver(pick(waiting))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(0, 3 * PIECE_NBYTES) | st.integers(0, 100), min_size=1, max_size=8),
    late=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_messages_arrive_whole_and_in_order(lengths, late, seed):
    a, b = flow_controls()
    wire, chance = Wire(a, b), random.Random(seed)
    messages = [chance.randbytes(length) for length in lengths]
    buffers, done = [bytearray(length) for length in lengths], []
    early = max(0, len(messages) - late)
    for index, buffer in enumerate(buffers[:early]):
        wire.put(b.expect("a", 7, memoryview(buffer), lambda index=index: done.append(index)))
    for message in messages:
        wire.put(a.send("b", 7, memoryview(message), lambda: None))
    wire.run(chance.choice)
    for index, buffer in enumerate(buffers[early:], early):
        wire.put(b.expect("a", 7, memoryview(buffer), lambda index=index: done.append(index)))
        wire.run(chance.choice)
    assert done == list(range(len(messages)))
    assert buffers == [bytearray(message) for message in messages]
    assert a.held_nbytes == b.held_nbytes == 0


def test_a_receiver_that_takes_nothing_is_sent_no_more_than_its_window():
    a, b = flow_controls()
    wire, left = Wire(a, b), []
    for number in range(20):
        wire.put(a.send("b", 7, memoryview(bytes(PIECE_NBYTES)), lambda number=number: left.append(number)))
    wire.run()
    assert b.held_nbytes == WINDOW
    assert left == [0, 1, 2, 3]
    assert wire.max_nbytes <= WINDOW + 4 * HEADER_NBYTES
    for _ in range(20):
        wire.put(b.expect("a", 7, memoryview(bytearray(PIECE_NBYTES)), lambda: None))
        wire.run()
    assert left == list(range(20))
    assert wire.max_nbytes <= WINDOW + 8 * HEADER_NBYTES


def test_tags_do_not_wait_for_each_other():
    a, b = flow_controls()
    wire, done = Wire(a, b), []
    wire.put(a.send("b", 1, memoryview(b"first"), lambda: None))
    wire.put(a.send("b", 2, memoryview(b"second"), lambda: None))
    wire.run()
    buffer = bytearray(6)
    wire.put(b.expect("a", 2, memoryview(buffer), lambda: done.append(2)))
    assert (done, bytes(buffer)) == ([2], b"second")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequence": 1}, "some are lost"),
        ({"label": Label(step=4)}, "step=4"),
        ({"label": Label(basis_hash=b"another!")}, "basis_hash"),
        ({"length": 5}, "was next"),
        ({"origin": Origin(run=b"run-0002", generation=3)}, "another run"),
    ],
)
def test_what_is_not_expected_names_the_peer(change, words):
    _, b = flow_controls()
    frame = {"kind": PIECE, "origin": RUN, "label": Label(), "tag": 7, "sequence": 0, "length": 4} | change
    list(b.expect("a", 7, memoryview(bytearray(4)), lambda: None))
    with pytest.raises(ProtocolError, match=f"peer a.*{words}"):
        list(b.arrived("a", Header(**frame).pack(b"four")))


def test_what_is_stale_is_dropped_and_counted():
    _, b = flow_controls()
    for origin in (Origin(run=RUN.run, generation=2), Origin(run=RUN.run, generation=3, incarnation=1)):
        header = Header(kind=PIECE, origin=origin, label=Label(), tag=7, sequence=0, length=4)
        assert list(b.arrived("a", header.pack(b"four"))) == []
    assert b.stale == 2
    assert b.held_nbytes == 0


def test_credit_for_what_was_never_sent_is_refused():
    a, _ = flow_controls()
    list(a.send("b", 7, memoryview(b"four"), lambda: None))
    for total in (WINDOW - 1, WINDOW + 5):
        header = Header(kind=CREDIT, origin=RUN, label=Label(), tag=7, sequence=total)
        with pytest.raises(ProtocolError, match="credit"):
            list(a.arrived("b", header.pack()))


def test_a_peer_that_invents_tags_is_stopped():
    _, b = flow_controls()

    def invent():
        for tag in range(1000):
            header = Header(kind=PIECE, origin=RUN, label=Label(), tag=tag, sequence=0, length=PIECE_NBYTES)
            list(b.arrived("a", header.pack(bytes(PIECE_NBYTES))))

    with pytest.raises(ProtocolError, match="nobody asked for"):
        invent()
    assert b.held_nbytes <= 9 * WINDOW


headers = st.builds(
    Header,
    kind=st.integers(0, 3),
    origin=st.builds(Origin, run=st.just(RUN.run) | st.binary(min_size=8, max_size=8), generation=st.integers(2, 4)),
    label=st.builds(Label, step=st.integers(0, 1), microbatch=st.integers(0, 1)),
    tag=st.integers(0, 9),
    sequence=st.integers(0, 3) | st.integers(0, 2**64 - 1),
    length=st.integers(0, 10) | st.integers(0, 2**32 - 1),
    offset=st.integers(0, 10) | st.integers(0, 2**32 - 1),
)


def spoilt(frame, chance):
    """A bit flipped, cut short, made longer, or as it is."""
    kind = chance.randrange(4)
    if kind == 0:
        at = chance.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ 1 << chance.randrange(8)]) + frame[at + 1 :]
    if kind == 1:
        return frame[: chance.randrange(len(frame))]
    return frame + chance.randbytes(chance.randrange(1, 64)) if kind == 2 else frame


def busy_flow_control():
    a, _ = flow_controls()
    list(a.send("b", 1, memoryview(b"four"), lambda: None))
    list(a.expect("b", 2, memoryview(bytearray(4)), lambda: None))
    return a


def test_hostile_frames_cause_a_protocol_error_and_no_growth():
    """20,000 of them: 2,000 well formed ones with any content, and ten ways to spoil each."""
    tried: list[bytes] = []

    @settings(max_examples=2_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(header=headers, payload=st.binary(max_size=64), seed=st.integers(0, 2**32))
    def attack(header, payload, seed):
        chance, frame = random.Random(seed), header.pack(payload)
        frames = [spoilt(frame, chance) for _ in range(10)]
        tried.extend(frames)
        refused(frames)

    def refused(frames):
        count, flow_control = 0, busy_flow_control()
        for frame in frames:
            try:
                list(flow_control.arrived("b", frame))
            except ProtocolError:
                count, flow_control = count + 1, busy_flow_control()
            assert flow_control.held_nbytes < 10_000
        return count

    attack()
    tracemalloc.start()
    assert refused(tried) > 0.5 * len(tried)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tried) >= 20_000
    assert grown < 1 << 20
