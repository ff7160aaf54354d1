"""Peers that hang outside of an epoch while their hearts beat: nobody waits for them without end."""

import io
import re

import msgspec
from rich.console import Console

from tests.train.commits import commit_by_hand, push_all, save_by_hand, tell_saved, wait_until
from tests.train.hubs import ask_again, ask_next, begin_epoch, next_request, report, running_hub
from tests.train.programs import PATIENCE
from thinpipe.checkpoint.folder import step_folder
from thinpipe.swarm import roster
from thinpipe.swarm.identity import Identity
from thinpipe.swarm.messages import Answer, Give, Measure, Work
from thinpipe.swarm.settings import JoinConfig
from thinpipe.train.join import PeerProgram


def test_one_that_hangs_while_it_measures_gives_its_turn_away(run_config):
    with (
        running_hub(run_config, errand_seconds=5.0) as running,
        running.post("p0") as hanging,
        running.post("p1") as other,
    ):
        assert isinstance(ask_next(hanging, running, report=None), Measure)
        assert isinstance(ask_again(other, running, report=None), Measure)
        (lost,) = [line for line in running.said if "lost" in line]
        words = r"p0 is lost: its heart beats, but it was told to measure \d+ s ago and has not asked again"
        assert re.fullmatch(words, lost.partition(" (")[0]), lost


def test_one_that_hangs_while_all_measure_together_is_not_waited_for(run_config):
    with (
        running_hub(run_config, ("p0", "p1", "p2"), hub_bps=None, errand_seconds=5.0) as running,
        running.post("p0") as first,
        running.post("p1") as second,
        running.post("p2") as hanging,
    ):
        asked = [post.ask("next", next_request(running), seconds=PATIENCE) for post in (first, second, hanging)]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert answers == [Measure(together=True)] * 3
        for post in (first, second):
            post.ask("next", next_request(running, together_bps=(1e6, 1e6)), seconds=PATIENCE)
        wait_until(lambda: running.hub.roster.hub_bps == (2e6, 2e6))
        assert "p2" not in running.hub.roster.present


def test_one_that_hangs_while_it_gives_does_not_keep_the_hub_from_falling_back(run_config, tmp_path):
    with (
        running_hub(run_config, patience_seconds=2.0, errand_seconds=5.0) as running,
        running.post("p0") as first,
        running.post("p1") as hanging,
    ):
        begin_epoch(running, first, hanging)
        hosted = running.hub.hosted
        for step in (4, 8):
            path = save_by_hand(hosted, step, tmp_path)
            tell_saved(first, path), tell_saved(hanging, path)
            push_all(first, path)
        (hosted.newest.path / "last.safetensors").unlink()
        asked = [post.ask("next", next_request(running, took_part_in=1), seconds=PATIENCE) for post in (first, hanging)]
        gives = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert [type(give) for give in gives] == [Give, Give]
        work = ask_again(first, running, took_part_in=1, gave=gives[0].manifest)
        assert isinstance(work, Work), work
        assert work.names == ["p0"]
        assert msgspec.json.decode(work.manifest)["step"] == 4


def test_no_epoch_begins_with_files_missing_because_one_never_came_out_of_the_last(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "MOST_SECONDS_TO_SAVE", 2.0)
    with (
        running_hub(run_config, patience_seconds=2.0) as running,
        running.post("p0") as first,
        running.post("p1") as hanging,
    ):
        begin_epoch(running, first, hanging)
        hosted = running.hub.hosted
        path = save_by_hand(hosted, 4, tmp_path)
        tell_saved(first, path), tell_saved(hanging, path)
        push_all(first, path)
        (hosted.newest.path / "last.safetensors").unlink()
        answer = ask_next(first, running, took_part_in=1)
        assert isinstance(answer, Give), answer
        assert any("p1 is lost: its heart beats, but it has not come out of epoch 1" in line for line in running.said)
        push_all(first, path, answer.files)
        work = ask_next(first, running, took_part_in=1, gave=answer.manifest)
        assert isinstance(work, Work)
        assert work.names == ["p0"]


def test_what_cannot_be_read_is_not_given_and_the_peer_says_so(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        commit_by_hand(post, hosted, 4, tmp_path)
        lost = ("blocks.1.safetensors", "last.safetensors")
        ours = tmp_path / "peer" / "checkpoints" / step_folder(4)
        ours.mkdir(parents=True)
        (ours / lost[0]).symlink_to("/proc/self/mem")  # a disk that answers with an error when it is read
        (hosted.newest.path / lost[1]).rename(ours / lost[1])
        (hosted.newest.path / lost[0]).unlink()
        give = ask_next(post, running, took_part_in=1, report=report())
        assert set(give.files) == set(lost)

        printed, address = io.StringIO(), post.address
        identity = Identity(
            run="r", invite="", url=address.url, fingerprint=address.fingerprint, name="p0", seed=address.seed
        )
        program = PeerProgram(identity, tmp_path / "peer", JoinConfig(invite=""), Console(file=printed, width=500))
        program._give(post, give)
        assert "blocks.1.safetensors cannot be read here (Input/output error)" in printed.getvalue()
        assert program.gave == give.manifest, "all that it has"
        assert list(hosted.missing) == [lost[0]], "the other one was given"
