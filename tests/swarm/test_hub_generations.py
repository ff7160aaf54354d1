"""Starts and ends of generations at a hub whose peers are driven by hand."""

import asyncio
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist

from tests.programs import PATIENCE, events_of
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, ask_next, begin_generation, next_request, running_hub
from tests.swarm.test_hub_shutdown import make_remote_run
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted
from thinpipe.swarm.protocol.messages import Answer, Finished, LeaveReply, LeaveRequest
from thinpipe.transport.nats.store import NatsStore


def test_the_start_of_a_generation_is_logged_before_anything_can_end_it(run_config, monkeypatch):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        reductions, logged = running.hub.generations.replicas[0].reductions, []
        begin = reductions.begin

        async def look(*arguments):
            logged.extend(event.generation for event in events_of(run_config, GenerationStarted))
            await begin(*arguments)

        monkeypatch.setattr(reductions, "begin", look)
        assert ask_next(connection, running).generation == 1
        assert logged == [1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_reason": "signal"}, "the hub's owner stopped the run"),
        ({"stop_reason": "not_saved"}, "the last step could not be saved"),
        ({"error": "no memory"}, "p0 stopped (no memory)"),
    ],
)
def test_after_the_owners_stop_no_end_of_a_generation_announces_another(run_config, fields, reason):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        running.hub.stop()
        asked = [first.submit("next", next_request(running, left_generation=1, **fields), seconds=PATIENCE)]
        wait_until(lambda: running.hub.membership.replicas[0].current is None)
        asked.append(second.submit("next", next_request(running, left_generation=1), seconds=PATIENCE))
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert all(isinstance(answer, Finished) for answer in answers), answers
        (ended,) = events_of(run_config, GenerationEnded)
        assert (ended.cause, ended.reason) == ("stopped", reason)
        assert f"generation 1 ended: {reason}" in running.printed


def test_a_peer_that_could_not_be_kicked_is_answered_again(run_config, monkeypatch):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        assert ask_next(connection, running).generation == 1

        async def fail(*_arguments):
            raise RuntimeError("the hub's own fault")

        with monkeypatch.context() as patched:
            patched.setattr(running.hub.generations, "remove", fail)
            kicked = asyncio.run_coroutine_threadsafe(running.hub.kick("p0"), running.loop)
            with pytest.raises(RuntimeError, match="the hub's own fault"):
                kicked.result(PATIENCE)
        assert ask_next(connection, running, left_generation=1).generation == 2


def test_who_writes_to_the_store_of_a_generation_that_has_ended_learns_of_it(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        store = NatsStore(connection, timedelta(seconds=PATIENCE))
        with pytest.raises(dist.DistStoreError, match="or the generation has ended"):
            store.set("key", b"value")


def test_a_peer_goes_on_to_save_although_the_hub_does_not_confirm_that_it_leaves(run_config, monkeypatch, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        assignment = ask_next(connection, running)
        with make_remote_run(connection, assignment, run_config, tmp_path) as remote_run:
            asked = []

            def suspended(service, _data, *, seconds):
                asked.append((service, seconds))
                raise TimeoutError(f"the hub did not answer within {seconds:g} s")

            with monkeypatch.context() as patched:
                patched.setattr(connection, "request", suspended)
                remote_run.before_stop_request()
                remote_run.before_stop_request()
        assert asked == [("leave", 5.0)], "once, and the all-reduce does not wait for long"


def test_the_hub_names_the_peer_whose_user_has_announced_to_leave(run_config, tmp_path):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        _, assignment = begin_generation(running, first, second)
        with make_remote_run(second, assignment, run_config, tmp_path) as remote_run:
            remote_run.before_stop_request()
        first.submit("next", next_request(running, left_generation=1, stop_reason="signal"), seconds=PATIENCE)
        wait_until(lambda: events_of(run_config, GenerationEnded))
        (ended,) = events_of(run_config, GenerationEnded)
        assert (ended.cause, ended.peer) == ("left", "p1")
        assert ask_as(second, "leave", LeaveRequest(incarnation="a"), LeaveReply) == LeaveReply()
