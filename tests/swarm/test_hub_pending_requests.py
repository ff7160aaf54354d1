"""Peers that hang outside of a generation while their heartbeats arrive: nobody waits for them without end."""

import io

import msgspec
from rich.console import Console

from tests.programs import PATIENCE, events_of, wait_for_event
from tests.swarm.commits import commit_by_hand, push_all, wait_until
from tests.swarm.hubs import ask_again, ask_next, begin_generation, identity_of, next_request, report, running_hub
from thinpipe.config.hub import JoinConfig
from thinpipe.core.hub_events import PeerLeft
from thinpipe.core.run_folder import step_folder
from thinpipe.swarm.hub import membership
from thinpipe.swarm.peer.join import PeerProcess
from thinpipe.swarm.protocol.messages import Answer, Assignment, Measure, RestoreFiles


def test_one_that_hangs_while_it_measures_gives_its_turn_away(run_config):
    with (
        running_hub(run_config, request_timeout_seconds=5.0) as running,
        running.connection("p0") as hanging,
        running.connection("p1") as other,
    ):
        assert isinstance(ask_next(hanging, running, report=None), Measure)
        assert isinstance(ask_again(other, running, report=None), Measure)
        (lost,) = events_of(run_config, PeerLeft)
        assert (lost.peer, lost.cause) == ("p0", "unresponsive")
        assert lost.reason in running.printed


def test_one_that_hangs_while_all_measure_together_is_not_waited_for(run_config):
    with (
        running_hub(run_config, ("p0", "p1", "p2"), hub_bps=None, request_timeout_seconds=5.0) as running,
        running.connection("p0") as first,
        running.connection("p1") as second,
        running.connection("p2") as hanging,
    ):
        asked = [
            connection.submit("next", next_request(running), seconds=PATIENCE)
            for connection in (first, second, hanging)
        ]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert answers == [Measure(concurrent=True)] * 3
        for connection in (first, second):
            connection.submit("next", next_request(running, concurrent_bps=(1e6, 1e6)), seconds=PATIENCE)
        wait_until(lambda: running.hub.membership.present.hub_bps == (2e6, 2e6))
        assert "p2" not in running.hub.membership.present


def test_one_that_hangs_while_it_gives_does_not_keep_the_hub_from_falling_back(run_config, tmp_path):
    with (
        running_hub(run_config, patience_seconds=2.0, request_timeout_seconds=5.0) as running,
        running.connection("p0") as first,
        running.connection("p1") as hanging,
    ):
        begin_generation(running, first, hanging)
        run_host = running.hub.run_host
        for step in (4, 8):
            commit_by_hand(run_host, step, tmp_path, first, hanging)
        (run_host.newest.path / "last.safetensors").unlink()
        asked = [
            connection.submit("next", next_request(running, left_generation=1), seconds=PATIENCE)
            for connection in (first, hanging)
        ]
        gives = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert [type(give) for give in gives] == [RestoreFiles, RestoreFiles]
        work = ask_again(first, running, left_generation=1, uploaded=gives[0].manifest)
        assert isinstance(work, Assignment), work
        assert work.names == ["p0"]
        assert msgspec.json.decode(work.manifest)["step"] == 4


def test_no_generation_begins_with_files_missing_because_one_never_came_out_of_the_last(
    run_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "MAX_UPLOAD_SECONDS", 2.0)
    with (
        running_hub(run_config, patience_seconds=2.0) as running,
        running.connection("p0") as first,
        running.connection("p1") as hanging,
    ):
        begin_generation(running, first, hanging)
        run_host = running.hub.run_host
        path = commit_by_hand(run_host, 4, tmp_path, first, hanging)
        (run_host.newest.path / "last.safetensors").unlink()
        answer = ask_next(first, running, left_generation=1)
        assert isinstance(answer, RestoreFiles), answer
        assert wait_for_event(run_config, PeerLeft, peer="p1").cause == "unresponsive"
        push_all(first, path, answer.files)
        work = ask_next(first, running, left_generation=1, uploaded=answer.manifest)
        assert isinstance(work, Assignment)
        assert work.names == ["p0"]


def test_what_cannot_be_read_is_not_given_and_the_peer_says_so(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        commit_by_hand(run_host, 4, tmp_path, connection)
        lost = ("blocks.1.safetensors", "last.safetensors")
        ours = tmp_path / "peer" / "checkpoints" / step_folder(4)
        ours.mkdir(parents=True)
        (ours / lost[0]).symlink_to("/proc/self/mem")  # a disk that answers with an error when it is read
        (run_host.newest.path / lost[1]).rename(ours / lost[1])
        (run_host.newest.path / lost[0]).unlink()
        give = ask_next(connection, running, left_generation=1, report=report())
        assert set(give.files) == set(lost)

        printed, address = io.StringIO(), connection.address
        identity = identity_of(address)
        program = PeerProcess(identity, tmp_path / "peer", JoinConfig(invite=""), Console(file=printed, width=500))
        program._restore_files(connection, give)
        assert "blocks.1.safetensors, because it cannot be read (Input/output error)" in printed.getvalue()
        assert program.uploaded == give.manifest, "all that it has"
        assert list(run_host.missing) == [lost[0]], "the other one was given"
