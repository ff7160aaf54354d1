"""Two programs of one peer: one that hangs must not hide what becomes of the other."""

import asyncio
import time

from tests.programs import PATIENCE, run_to_end
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, ask_next, running_hub
from thinpipe.swarm.protocol.messages import Assignment, LeaveRequest, RequestReply


def test_a_program_that_another_has_followed_neither_sends_heartbeats_nor_leaves_for_it(run_config):
    with (
        running_hub(run_config, ("p0",), heartbeat_timeout_seconds=10.0) as running,
        running.connection("p0", incarnation="a") as hanging,
    ):
        assert ask_next(hanging, running, incarnation="a").generation == 1
        with running.connection("p0", incarnation="b") as second:
            assert ask_next(second, running, incarnation="b").generation == 2
            ask_as(hanging, "leave", LeaveRequest(incarnation="a"), RequestReply)
            time.sleep(11)
            assert running.hub.generations.is_active("p0", 2), "its own heart is heard"
        wait_until(lambda: "generation 2 is over: p0 is lost: nothing was heard of it" in running.said)
        assert hanging.request("status", b"", seconds=PATIENCE), "the other one is connected all the time"


def test_who_only_looks_does_not_keep_a_peer_alive(run_config):
    with (
        running_hub(run_config, ("p0",), heartbeat_timeout_seconds=2.0) as running,
        running.connection("p0", incarnation="") as looking,
    ):
        with running.connection("p0") as connection:
            assert isinstance(ask_next(connection, running), Assignment)
        wait_until(lambda: "p0 is lost: nothing was heard of it" in running.said)
        assert looking.request("status", b"", seconds=PATIENCE)


def test_a_folder_has_one_program_which_is_followed_at_once_when_it_is_killed(run_config, programs, tmp_path):
    with running_hub(run_config) as running:
        invite = asyncio.run_coroutine_threadsafe(running.hub.admission.invite(), running.loop).result(PATIENCE).line()
        first = programs("anna", "join", invite, "--folder", tmp_path / "anna", "--name", "anna")
        first.until("2 of 2 peers|1 of 2 peers")
        code, printed = run_to_end("join", tmp_path / "anna")
        assert code == 2
        assert f"{tmp_path / 'anna'} is in use by another `thinpipe join`" in printed
        assert "end that one first" in printed
        assert running.hub.membership.present == ["anna"], "nobody was disturbed"
        assert not [line for line in running.said if "lost" in line or "left" in line]

        first.stop()  # SIGKILL
        second = programs("anna again", "join", tmp_path / "anna")
        second.until("you are anna")
        wait_until(lambda: running.said.count("anna is there") == 2)
        second.stop()
