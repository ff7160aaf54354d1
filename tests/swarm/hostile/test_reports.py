"""A member that reports without end what no step shows: neither the owner's console nor the event log fills with it,
and nobody waits for it."""

import msgspec
import numpy as np
import pytest

from tests.programs import PATIENCE, events_of
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, begin_generation, next_request, running_hub
from thinpipe.core.events import SaveFailed, Step
from thinpipe.core.hub_events import FilesRefused, PeerSuspended
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import AnnouncementReply, CheckpointAnnouncement, EventReport
from thinpipe.swarm.protocol.reduction import ReduceReply, ReduceRequest
from thinpipe.swarm.protocol.signed_files import Occasion, SignedFile, sign_file
from thinpipe.swarm.protocol.status import Status

REPORTS = 300
MAX_LINES = 30
"""That the owner may read of one peer in a generation."""


@pytest.fixture
def running(run_config):
    with running_hub(run_config) as running:
        yield running


@pytest.fixture
def generation(running):
    """Connections of the first and the second peer of a generation."""
    with running.connection("p0") as p0, running.connection("p1") as p1:
        names = begin_generation(running, p0, p1)[0].names
        yield (p0, p1) if names[0] == "p0" else (p1, p0)


def announcement_of(running, connection, step, files):
    """Signed with the key of the peer."""
    key = KeyPair.from_seed(connection.address.credentials.seed)
    occasion = Occasion(run=running.hub.broker.fingerprint, generation=1, step=step)
    return CheckpointAnnouncement(
        generation=1,
        step=step,
        samples_seen=step * running.hub.run_host.config.training.global_batch_size,
        basis_version=None,
        basis_sha256=None,
        files=[sign_file(key, occasion, name, 1, "0" * 64) for name in files],
    )


def test_events_without_end(running, generation, run_config):
    first, _ = generation
    for number in range(REPORTS):
        failed = SaveFailed(step=1, reason=f"{number} " * 1000)
        false = Step(step=number + 1, loss=1, grad_norm=1, lr=1e-3, tokens=1, seconds=1, tokens_per_second=1)
        for event in (failed, false):
            first.publish("event", msgspec.msgpack.encode(EventReport(generation=1, event=msgspec.json.encode(event))))
    ask_as(first, "status", 0, Status)  # which takes turns with what arrived before it
    wait_until(lambda: not running.hub.services.held_nbytes)
    assert events_of(run_config, Step) == []
    assert 0 < len(events_of(run_config, SaveFailed)) <= MAX_LINES
    told = [line for line in running.printed if "reports" in line]
    assert 0 < len(told) <= MAX_LINES
    assert "before the next generation" in told[-1]


def test_who_lies_in_a_sum_and_leaves_at_once_is_suspended_all_the_same(running, generation, run_config):
    """The generation has ended for another reason before the hub looks for what was contributed."""
    _, second = generation
    values = np.array([-1.0], "<f8").tobytes()
    lie = ReduceRequest(generation=1, round_number=1, op="counts", values=values)
    replies = [
        second.submit("reduce", msgspec.msgpack.encode(lie), seconds=PATIENCE),
        second.submit("next", next_request(running, left_generation=1, error="oops"), seconds=PATIENCE),
    ]
    assert "below 0" in msgspec.msgpack.decode(replies[0].result(PATIENCE), type=ReduceReply).refusal
    wait_until(lambda: events_of(run_config, PeerSuspended))
    assert [event.peer for event in events_of(run_config, PeerSuspended)] == [second.address.name]


def test_false_files_without_end(running, generation, run_config):
    _, second = generation
    for number in range(2 * MAX_LINES):
        announced = announcement_of(running, second, 1, [f"made.up{number}.safetensors"])
        assert ask_as(second, "checkpoint", announced, AnnouncementReply).refusal
    assert 0 < len(events_of(run_config, FilesRefused)) <= MAX_LINES


def test_no_signature_is_checked_of_files_that_a_peer_does_not_hold(running, generation, monkeypatch):
    """Thousands took all threads of the hub for half a minute, and so the batches of the first peer."""
    _, second = generation
    announced = announcement_of(running, second, 1, ["made.up.safetensors"])
    announced = msgspec.structs.replace(announced, files=announced.files * 9000)
    honest, checked = SignedFile.is_signed_by, []

    def counted(file, *key):
        checked.append(file.name)
        return honest(file, *key)

    monkeypatch.setattr(SignedFile, "is_signed_by", counted)
    data = msgspec.msgpack.encode(announced)
    assert msgspec.msgpack.decode(second.request("checkpoint", data, seconds=PATIENCE), type=AnnouncementReply).refusal
    assert len(checked) <= 10
