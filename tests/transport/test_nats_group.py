"""A process group over a real NATS server with TLS: order, pieces, credit, collectives, and how everything ends."""

import os
import re
import signal
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import ORIGIN, address, hub_services, open_groups, together
from thinpipe.swarm.hub.liveness import Heartbeats
from thinpipe.swarm.hub.services.store import MAX_VALUE_NBYTES
from thinpipe.swarm.protocol.probe import Probe
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.broadcasts import GenerationOver
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup
from thinpipe.transport.nats.store import NatsStore
from thinpipe.transport.nats.streams import PIECE_NBYTES

NAMES = ("p0", "p1", "p2")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("broker"), NAMES) as running:
        yield running


def test_messages_arrive_in_the_order_of_their_receives(running):
    with open_groups(running, NAMES[:2]) as (a, b):
        sent = [torch.full((length,), float(length)) for length in (3, 1, 1_000, 700_000, 2)]
        received = [torch.empty_like(tensor) for tensor in sent]
        works = [b.recv([tensor], 0, 5) for tensor in received[:2]]
        sends = [a.send([tensor], 1, 5) for tensor in sent]
        works += [b.recv([tensor], 0, 5) for tensor in received[2:]]
        for work in (*sends, *works):
            assert work.wait()
        for mine, theirs in zip(sent, received, strict=True):
            assert torch.equal(mine, theirs)


def test_a_tag_does_not_wait_for_another_and_both_ways_go_at_once(running):
    with open_groups(running, NAMES[:2]) as (a, b):
        a.send([torch.tensor([1.0])], 1, 1)
        a.send([torch.tensor([2.0])], 1, 2)
        b.send([torch.tensor([3.0])], 0, 1)
        found = [torch.empty(1) for _ in range(3)]
        for work in (b.recv([found[1]], 0, 2), b.recv([found[0]], 0, 1), a.recv([found[2]], 1, 1)):
            work.wait()
        assert [tensor.item() for tensor in found] == [1, 2, 3]


def test_collectives_take_everybody(running):
    with open_groups(running, NAMES) as groups:

        def take_part(group):
            mine = torch.tensor([float(group.rank() + 1), 10.0])
            summed, spread = mine.clone(), mine.clone()
            group.allreduce([summed], dist.AllreduceOptions()).wait()
            options = dist.BroadcastOptions()
            options.rootRank = 1
            group.broadcast([spread], options).wait()
            gathered = [torch.empty(2) for _ in range(3)]
            group.allgather([gathered], [mine]).wait()
            group.barrier().wait()
            return summed.tolist(), spread.tolist(), [part[0].item() for part in gathered]

        for found in together(*(lambda group=group: take_part(group) for group in groups)):
            assert found == ([6.0, 30.0], [2.0, 10.0], [1.0, 2.0, 3.0])


def test_a_receiver_that_takes_nothing_bounds_what_is_in_flight(running):
    window = 4 * PIECE_NBYTES
    with open_groups(running, NAMES[:2], window=window) as (a, b):
        sends = [a.send([torch.zeros(PIECE_NBYTES, dtype=torch.uint8)], 1, 1) for _ in range(20)]
        deadline = time.monotonic() + 300
        while b.held_nbytes < window or sum(work.is_completed() for work in sends) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        assert b.held_nbytes == window
        assert sum(work.is_completed() for work in sends) == 4
        buffers = [torch.ones(PIECE_NBYTES, dtype=torch.uint8) for _ in range(20)]
        for work in [b.recv([buffer], 0, 1) for buffer in buffers] + sends:
            assert work.wait()
        assert not any(buffer.any() for buffer in buffers)
        assert b.held_nbytes == a.held_nbytes == 0


@pytest.mark.parametrize(
    ("length", "label", "words"), [(3, Label(), "was next"), (2, Label(step=1, microbatch=4), "microbatch=4")]
)
def test_what_is_not_expected_fails_the_receiver_at_once_and_names_the_peer(running, length, label, words):
    with open_groups(running, NAMES[:2]) as (a, b):
        a.label(1, label)
        work, other = b.recv([torch.empty(2)], 0, 1), b.recv([torch.empty(2)], 0, 9)
        a.send([torch.zeros(length)], 1, 1)
        for each in (work, other):
            with pytest.raises(dist.DistNetworkError, match=f"peer p0.*{words}"):
                each.wait()
        with pytest.raises(dist.DistNetworkError, match="peer p0"):
            b.send([torch.zeros(1)], 0, 3).wait()


def test_a_wait_ends_with_its_time(running):
    with open_groups(running, NAMES[:2], timeout=timedelta(seconds=0.3)) as (_, b):
        work = b.recv([torch.empty(1)], 0, 1)
        with pytest.raises(dist.DistNetworkError, match=r"0\.3 seconds"):
            work.wait()


def test_everybody_is_told_of_a_lost_peer(running):
    heartbeats = Heartbeats(timeout_seconds=5.0)
    with hub_services(running, heartbeats=heartbeats), open_groups(running, NAMES) as (a, b, c):
        works = [a.recv([torch.empty(1)], 2, 1), c.recv([torch.empty(1)], 0, 1)]
        while "p1" not in heartbeats._last:  # it has been heard
            time.sleep(0.05)
        b.connection.close()
        for work in works:
            with pytest.raises(dist.DistNetworkError, match="p1 is lost"):
                work.wait()


def test_processes_meet_in_the_hubs_store(running):
    with open_groups(running, NAMES) as groups, hub_services(running):
        stores = [NatsStore(group.connection, timedelta(seconds=300)) for group in groups]

        def take_part(rank, store):
            store.set(f"name{rank}", f"peer {rank}")
            store.wait([f"name{other}" for other in range(3)])
            return [store.get(f"name{other}").decode() for other in range(3)], store.add("count", rank + 1)

        found = together(*(lambda r=r, s=s: take_part(r, s) for r, s in enumerate(stores)))
        assert [names for names, _ in found] == [["peer 0", "peer 1", "peer 2"]] * 3
        assert max(number for _, number in found) == 6
        assert stores[0].check(["name0"])
        assert not stores[0].check(["nothing"])
        assert stores[0].compare_set("lock", "", "mine") == b"mine"
        assert stores[1].compare_set("lock", "", "theirs") == b"mine"
        assert stores[1].delete_key("lock")
        with pytest.raises(dist.DistStoreError) as caught:
            stores[0].wait(["never"], timedelta(seconds=0.2))
        told = re.fullmatch(r"waited (\d+\.\d) s for never in the hub's store", str(caught.value))
        assert told is not None
        assert float(told[1]) >= 0.2


def test_the_hubs_store_refuses_what_is_too_much_and_the_writer_learns_of_it(running):
    with open_groups(running, NAMES[:1]) as (group,), hub_services(running):
        store, too_long = NatsStore(group.connection, timedelta(seconds=300)), b"x" * (MAX_VALUE_NBYTES + 1)
        with pytest.raises(
            dist.DistStoreError, match=rf"refused 'long' with {len(too_long)} bytes: the value is too long"
        ):
            store.set("long", too_long)
        with pytest.raises(dist.DistStoreError, match="refused 'long'"):
            store.compare_set("long", "", too_long)
        assert not store.check(["long"])
        store.set("short", too_long[:-1])
        assert store.get("short") == too_long[:-1]


def test_a_killed_server_fails_what_waits(tmp_path):
    with running_broker(tmp_path, NAMES[:2]) as running, open_groups(running, NAMES[:2]) as (a, b):
        works = [a.recv([torch.empty(1)], 1, 1), b.recv([torch.empty(1)], 0, 1)]
        os.kill(running.broker.server_pid, signal.SIGKILL)
        for work in works:
            with pytest.raises(dist.DistNetworkError):
                work.wait(timedelta(seconds=300))


def test_a_closed_group_lets_its_mail_leave_and_refuses_more(running):
    with open_groups(running, NAMES[:2]) as (a, b):
        found = torch.empty(2_000_000)
        work = b.recv([found], 0, 1)
        a.send([torch.ones(2_000_000)], 1, 1)
        a.close()
        work.wait()
        assert found.all()
        with pytest.raises(dist.DistNetworkError, match="closed"):
            a.send([torch.ones(1)], 1, 1).wait()


def test_who_is_not_in_this_generation_is_not_heard_and_disturbs_nobody(running):
    """A peer of the server that was given up, and goes on sending to one that computes with others by now."""
    with hub_services(running), open_groups(running, NAMES[:2]) as (a, b):
        connection = HubConnection(address(running, "p2"))
        stranger = NatsGroup(connection, ("p2", "p1"), ORIGIN, timeout=timedelta(seconds=300))
        try:
            found = torch.empty(1)
            work = b.recv([found], 0, 1)
            stranger.send([torch.full((1,), 7.0)], 1, 1).wait()
            connection.request("probe", msgspec.msgpack.encode(Probe(answer_nbytes=1)), seconds=300)
            a.send([torch.ones(1)], 1, 1)
            work.wait()
            assert found.item() == 1
            assert not b._flow_control.stale, "the server does not pass it on"
        finally:
            connection.close()


def test_one_post_carries_one_group_after_another_and_drops_mail_of_the_earlier(running):
    posts = [HubConnection(address(running, name)) for name in NAMES[:2]]
    try:
        for generation in range(3):
            origin = Origin(run=ORIGIN.run, generation=generation)
            a, b = (NatsGroup(connection, NAMES[:2], origin, timeout=timedelta(seconds=300)) for connection in posts)
            found = torch.empty(1)
            a.send([torch.full((1,), float(generation))], 1, 1)
            b.recv([found], 0, 1).wait()
            assert found.item() == generation
            a.send([torch.full((1,), -1.0)], 1, 1)  # nobody asks for it in this generation
            a.close()
            b.close()
    finally:
        for connection in posts:
            connection.close()


def over(generation, reason):
    return msgspec.msgpack.encode(GenerationOver(generation=generation, reason=reason))


def test_a_generation_that_the_hub_calls_over_ends_for_those_in_it_alone(running):
    with hub_services(running) as tell, open_groups(running, NAMES[:2]) as (_, b):
        work = b.recv([torch.empty(1)], 0, 1)
        tell("bcast.generation_over", over(7, "another generation"))
        assert not work.is_completed()
        tell("bcast.generation_over", b"0 not a message")
        assert not work.is_completed()
        tell("bcast.generation_over", over(0, "the generation is over"))
        with pytest.raises(dist.DistNetworkError, match="the generation is over"):
            work.wait()
