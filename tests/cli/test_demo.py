"""`thinpipe demo` as a new user meets it: real processes, links, a hub and a killed peer, and the picture."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.programs import PATIENCE
from tests.swarm.commits import wait_until
from thinpipe.cli.demo_figure import Curve, KilledPeer
from thinpipe.core.events import Step, read_events
from thinpipe.core.hub_events import GenerationStarted, PeerJoined, PeerLeft


def demo(folder, *arguments):
    command = [sys.executable, "-m", "thinpipe", "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.long
def test_thin_is_faster_and_the_killed_peer_comes_back(tmp_path):
    done = demo(tmp_path, "shown", "--seconds", "40", "--rate", "5mbps")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "shown"
    assert (folder / "demo.png").stat().st_size > 20_000
    thick, thin = (list(read_events(folder / name / "events.jsonl")) for name in ("thick", "thin"))
    speeds = [sum(isinstance(event, Step) for event in events) for events in (thick, thin)]
    assert speeds[1] > 1.5 * speeds[0]
    friends = list(read_events(folder / "friends/events.jsonl"))
    (left,) = (event for event in friends if isinstance(event, PeerLeft) and event.cause != "stopped")
    joined = [event.peer for event in friends if isinstance(event, PeerJoined)]
    assert joined.count(left.peer) == 2
    assert f"{left.peer} was killed" in done.stdout
    assert "the run went on from its last commit" in done.stdout
    assert left_over("shown/friends") == []


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM is a kill there")
def test_nothing_outlives_a_demo_that_is_ended(tmp_path):
    command = [sys.executable, "-m", "thinpipe", "demo", "shown"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "shown/thick/output.log").exists)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert left_over("shown/thick") == []


def left_over(words):
    """Programs with these words in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if words in " ".join(each.info["cmdline"] or [])]


def test_a_folder_that_is_in_use_is_refused_at_once(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/file").touch()
    done = demo(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "another folder" in done.stderr
    assert list(Path(tmp_path).iterdir()) == [tmp_path / "demo"]


def step(number, moment, **fields):
    fields = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "seconds": 0.5, "tokens_per_second": 100.0} | fields
    return Step(step=number, time_s=moment, tokens=50 * number, **fields)


def test_a_kill_is_told_from_the_log():
    log = [
        GenerationStarted(generation=1, step=0, peers=[], time_s=9.0),
        *(step(number, 10.0 + number) for number in range(1, 24)),
        PeerLeft(step=20, peer="p2", cause="lost", reason="lost", time_s=33.5),
        PeerJoined(step=20, peer="p2", time_s=37.0),
        GenerationStarted(generation=2, step=20, peers=[], time_s=39.0),
        *(step(number, 20.0 + number) for number in range(21, 30)),
    ]
    killed_peer = KilledPeer.of(log, killed_at=33.2)
    assert (killed_peer.name, killed_peer.step, killed_peer.from_step) == ("p2", 23, 20)
    assert (killed_peer.back_at, killed_peer.working_again_at) == (37.0, 41.0)
    assert KilledPeer.of(log[:25], killed_at=33.2).working_again_at is None


def test_speed_counts_from_the_first_step():
    curve = Curve.of([step(1, 100.0), step(2, 102.0), step(3, 104.0)])
    assert curve.speed == pytest.approx(25.0)
