"""Two programs of one peer: one that hangs must not hide what becomes of the other."""

import asyncio
import time

from tests.programs import PATIENCE, events_of, run_to_end, wait_for_event
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, ask_next, running_hub
from thinpipe.core.hub_events import GenerationEnded, PeerJoined, PeerLeft
from thinpipe.swarm.protocol.messages import Assignment, LeaveReply, LeaveRequest


def test_a_program_that_another_has_followed_neither_sends_heartbeats_nor_leaves_for_it(run_config):
    with (
        running_hub(run_config, ("p0",), heartbeat_timeout_seconds=10.0) as running,
        running.connection("p0", incarnation="a") as hanging,
    ):
        assert ask_next(hanging, running, incarnation="a").generation == 1
        with running.connection("p0", incarnation="b") as second:
            assert ask_next(second, running, incarnation="b").generation == 2
            ask_as(hanging, "leave", LeaveRequest(incarnation="a"), LeaveReply)
            time.sleep(11)
            assert running.hub.generations.is_active("p0", 2), "its own heartbeats arrive"
        ended = wait_for_event(run_config, GenerationEnded, generation=2)
        assert (ended.cause, ended.peer) == ("no_heartbeat", "p0")
        assert hanging.request("status", b"", seconds=PATIENCE), "the other one is connected all the time"


def test_who_only_looks_does_not_keep_a_peer_alive(run_config):
    with (
        running_hub(run_config, ("p0",), heartbeat_timeout_seconds=2.0) as running,
        running.connection("p0", incarnation="") as looking,
    ):
        with running.connection("p0") as connection:
            assert isinstance(ask_next(connection, running), Assignment)
        assert wait_for_event(run_config, PeerLeft, peer="p0").cause == "no_heartbeat"
        assert looking.request("status", b"", seconds=PATIENCE)


def test_a_folder_has_one_program_which_is_followed_at_once_when_it_is_killed(run_config, programs, tmp_path):
    with running_hub(run_config) as running:
        invite = asyncio.run_coroutine_threadsafe(running.hub.admission.invite(), running.loop).result(PATIENCE).line()
        first = programs("anna", "join", invite, "--folder", tmp_path / "anna", "--name", "anna")
        first.until("2 of 2 peers|1 of 2 peers")
        code, printed = run_to_end("join", tmp_path / "anna")
        assert code == 2
        assert f"{tmp_path / 'anna'} is in use by another `thinpipe join`: stop that process first" in printed
        assert list(running.hub.membership.present) == ["anna"], "nobody was disturbed"
        assert events_of(run_config, PeerLeft) == []

        first.stop()  # SIGKILL
        second = programs("anna again", "join", tmp_path / "anna")
        wait_until(lambda: len(events_of(run_config, PeerJoined)) == 2)
        second.stop()
