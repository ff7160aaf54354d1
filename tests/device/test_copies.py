"""Copies of messages and of the optimiser's state between `sim` and the host, and the way of messages to a neighbour,
in 20 orders in which threads may meet.

Each statement that orders a copy is needed by one of these tests: `python -m tests.device.mutations` deletes each in
turn.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from thinpipe.device.host_copies import CopyToHost, host_buffer, pinned, stream_through, to_device
from thinpipe.pipeline.p2p import P2PReceiver, P2PSender
from thinpipe.transport.labels import Label

NBYTES, TAG = 4096, 16


@pytest.fixture(params=range(1, 21), ids=lambda seed: f"seed{seed}")
def seed(request, sim):
    sim.set_seed(request.param)
    return request.param


@pytest.fixture
def groups():
    """Both ends of a gloo group."""
    store = dist.HashStore()

    def open_group(rank):
        return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=300))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(open_group, range(2)))


def message(number, device):
    """Computed on the device."""
    return torch.arange(NBYTES, device=device).mul_(number).remainder_(251).to(torch.uint8)


def sender_of(group, device):
    return P2PSender(group, 1, TAG, name="states to stage 1", device=torch.device(device))


def receiver_of(group, device):
    return P2PReceiver(group, 0, TAG, name="states from stage 0", device=torch.device(device))


WAITS = {"synchronize_stream", "synchronize_device", "synchronize_item", "to_host_blocking", "to_device_blocking"}
"""Counts of what makes the training thread wait for the device."""


@pytest.mark.usefixtures("seed")
class TestToTheHost:
    def test_the_copy_is_of_what_was_computed(self, sim):
        copy = CopyToHost(message(3, "sim"))
        copy.wait()
        assert torch.equal(copy.host, message(3, "cpu"))
        assert sim.counts()["synchronize_event"] == sim.counts()["to_host_non_blocking"] == 1
        assert not WAITS & sim.counts().keys()

    def test_memory_of_the_message_is_kept_until_the_copy_is_done(self):
        copies = [CopyToHost(message(number, "sim")) for number in range(3)]
        message(4, "sim")
        for number, copy in enumerate(copies):
            copy.wait()
            assert torch.equal(copy.host, message(number, "cpu"))

    def test_a_thread_waits_on_the_device_of_the_message(self, sim):
        """A thread starts on the first device, and CUDA would take memory there for a context."""
        copy = CopyToHost(message(5, "sim:1"))
        thread = threading.Thread(target=copy.wait)
        thread.start()
        thread.join()
        assert torch.equal(copy.host, message(5, "cpu"))
        assert not sim.counts()["synchronize_elsewhere"]


@pytest.mark.usefixtures("seed")
class TestToTheDevice:
    @pytest.mark.parametrize("device", ["sim", "sim:1"])
    def test_the_message_can_be_computed_with(self, sim, device):
        received = host_buffer(NBYTES, torch.device(device)).copy_(message(3, "cpu"))
        arrived = to_device(received, torch.device(device))
        del received
        changed = arrived + 1
        assert sim.counts()["to_device_non_blocking"] == 1
        assert not {*WAITS, "synchronize_event"} & sim.counts().keys()
        assert torch.equal(changed.cpu(), message(3, "cpu") + 1)

    def test_memory_of_the_message_is_not_used_again_too_early(self):
        arrived = [
            to_device(host_buffer(NBYTES, torch.device("sim")).fill_(number), torch.device("sim"))
            for number in range(3)
        ]
        changed = [one + 1 for one in arrived]
        del arrived
        assert [one.cpu().unique().tolist() for one in changed] == [[1], [2], [3]]


@pytest.mark.usefixtures("seed")
class TestThroughTheDevice:
    def state(self, batches):
        """Batches of tensors with unlike shapes and data types, in pinned memory."""
        return [
            [pinned(message(number, "cpu")), pinned(torch.full((5, 3), float(number))), pinned(torch.tensor([number]))]
            for number in range(batches)
        ]

    @pytest.mark.parametrize("batches", [0, 1, 2, 5])
    def test_what_is_changed_on_the_device_is_on_the_host_in_the_end(self, sim, batches):
        state, wanted = self.state(batches), [[tensor + 1 for tensor in batch] for batch in self.state(batches)]
        message(7, "sim")  # whose memory the buffers may be given
        for copies in stream_through(state, torch.device("sim")):
            for copy in copies:
                copy.add_(1)
        for batch, wanted_batch in zip(state, wanted, strict=True):
            assert [*map(torch.equal, batch, wanted_batch)] == [True] * 3
        assert sim.counts()["to_device_non_blocking"] == sim.counts()["to_host_non_blocking"] == 3 * batches
        assert (sim.counts()["synchronize_stream"], *(WAITS & sim.counts().keys())) == (1, "synchronize_stream")

    def test_memory_for_two_batches_is_taken_and_given_back(self, sim):
        before, state = sim.memory_allocated(), self.state(5)
        sim.reset_peak_memory_stats()
        assert sum(len(copies) for copies in stream_through(state, torch.device("sim"))) == 15
        assert sim.max_memory_allocated() - before == 2 * (NBYTES + 2 * 256)
        assert sim.memory_allocated() == before


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("devices", [("sim", "sim"), ("sim", "cpu"), ("cpu", "sim")], ids=" to ".join)
def test_messages_arrive_in_order_and_no_training_thread_waits_for_a_device(sim, groups, devices):
    sender, receiver = sender_of(groups[0], devices[0]), receiver_of(groups[1], devices[1])
    for step in range(2):
        receiver.expect(6, NBYTES, Label(step=step))
        sender.begin_step()
        wanted = [message(10 * step + number, devices[1]) for number in range(6)]
        for number in range(6):
            sender.send(message(10 * step + number, devices[0]), Label(step=step), number)
        found = [receiver.receive(number) for number in range(6)]
        assert not WAITS & sim.counts().keys()
        assert [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)] == [True] * 6
        sim.reset_counts()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.usefixtures("sim")
class TestSendsAndReceives:
    def test_a_receive_waits_for_its_message(self, groups, device):
        sender, receiver = sender_of(groups[0], device), receiver_of(groups[1], device)
        receiver.expect(1, NBYTES, Label())
        found = []
        receiving = threading.Thread(target=lambda: found.append(receiver.receive(0)), daemon=True)
        receiving.start()
        receiving.join(0.3)
        assert receiving.is_alive(), "nobody has sent a message"
        sender.send(message(7, device), Label(), 0)
        receiving.join(300)
        assert torch.equal(found[0].cpu(), message(7, "cpu"))

    def test_messages_of_two_steps_may_queue_up(self, groups, device):
        sender, receiver = sender_of(groups[0], device), receiver_of(groups[1], device)
        for step in range(2):
            sender.begin_step()
            sender.send(message(step, device), Label(), step)
        third = threading.Thread(target=sender.begin_step, daemon=True)
        third.start()
        third.join(0.3)
        assert third.is_alive(), "nobody has taken the message of the first step"
        receiver.expect(1, NBYTES, Label())
        receiver.receive(0)
        third.join(300)
        assert not third.is_alive()
        receiver.expect(1, NBYTES, Label())
        assert torch.equal(receiver.receive(0).cpu(), message(1, "cpu"))


class RefusesOne(dist.ProcessGroup):
    """A group that refuses its first message, when all are under way."""

    def __init__(self):
        super().__init__(0, 2)
        self.queued, self.refused, self.sent = threading.Event(), False, []

    def send(self, tensors, dst, tag):  # noqa: ARG002
        self.queued.wait()
        if not self.refused:
            self.refused = True
            raise RuntimeError("no more")
        self.sent.append(tensors)
        return Done()


class Done(dist.Work):
    def wait(self, timeout=None):  # noqa: ARG002
        return True


@pytest.mark.usefixtures("sim")
def test_after_a_failure_nothing_is_sent():
    """The receiver would take the second message for the first."""
    group = RefusesOne()
    sender = sender_of(group, "sim")
    sender.begin_step()
    for number in range(3):
        sender.send(message(number, "sim"), Label(), number)
    group.queued.set()
    with suppress(ConnectionError):
        sender.begin_step()
    with pytest.raises(ConnectionError, match="could not send states to stage 1: no more"):
        sender.begin_step()
    with pytest.raises(ConnectionError, match="no more"):
        sender.send(message(4, "sim"), Label(), 4)
    assert not group.sent
