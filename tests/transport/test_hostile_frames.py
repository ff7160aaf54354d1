"""Altered and replayed frames against a process group over a real server: 200 tries of each kind, none accepted."""

import random
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.swarm.attacks import TRIES, counted
from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import ORIGIN, address
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.frame import PIECE, Header, Origin
from thinpipe.transport.nats.group import PIECES, NatsGroup

NAMES = ("p0", "p1")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("frames"), NAMES) as running:
        yield running


def frame(number, *, generation, sequence=0, incarnation=0, run=ORIGIN.run):
    origin = Origin(run=run, generation=generation, incarnation=incarnation)
    header = Header(kind=PIECE, origin=origin, label=Label(), tag=1, sequence=sequence, length=4)
    return header.pack(number.to_bytes(4, "little"))


def altered(good, number):
    """A bit that changed, an end that is missing, or bytes behind it."""
    chance, kind = random.Random(number), number % 4
    if kind < 2:
        at = chance.randrange(len(good))
        return good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :]
    return good[: chance.randrange(len(good))] if kind == 2 else good + chance.randbytes(chance.randrange(1, 64))


def replayed(number):
    """Frames that were good once: a moment ago, in the generation before, in another life of the sender, in another
    run."""
    return [
        frame(1, generation=number),
        frame(66, generation=max(0, number - 1), sequence=1),
        frame(66, generation=number, incarnation=1, sequence=1),
        frame(66, generation=number, run=b"otherrun", sequence=1),
    ][number % 4]


def attack(sender, receiver, number, bad):
    """One honest message, the bad frame, another honest message: what became of the receiver, which wants two."""
    group = NatsGroup(receiver, NAMES, Origin(run=ORIGIN.run, generation=number), timeout=timedelta(seconds=60))
    try:
        found = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        first, second = (group.recv([tensor], 0, 1) for tensor in found)
        for each in (frame(1, generation=number), bad, frame(2, generation=number, sequence=1)):
            sender.send("p1", PIECES, each)
        first.wait()
        assert found[0].item() == 1
        try:
            second.wait()
        except dist.DistNetworkError as error:
            refused = "peer p0: " in str(error) and found[1].item() == 0
            return "refused by name" if refused else "accepted"
        return "dropped" if found[1].item() == 2 else "accepted"
    finally:
        group.close()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("altered", {"refused by name": TRIES}), ("replayed", {"refused by name": TRIES / 2, "dropped": TRIES / 2})],
)
def test_frames_that_are(running, kind, expected):
    p0, p1 = (HubConnection(address(running, name)) for name in NAMES)
    with closing(p0) as sender, closing(p1) as receiver, counted() as ends:
        for number in range(TRIES):
            bad = replayed(number) if kind == "replayed" else altered(frame(66, generation=number, sequence=1), number)
            ends[attack(sender, receiver, number, bad)] += 1
    assert ends == expected
