"""docs/tutorials/three-friends.md from its first command to its last, in order, with fewer steps and a free port."""

import pytest

from tests.programs import ENVIRONMENT, invites_of
from tests.readme.pages import ROOT, marked
from tests.swarm.commits import wait_until
from tests.warm import run_warm
from thinpipe.core.events import Saved, Step, read_events
from thinpipe.core.hub_events import GenerationStarted, PeerLeft

PAGE = ROOT / "docs/tutorials/three-friends.md"
STEPS = 60
FEWER_STEPS = ("--training.steps", STEPS, "--lr-scheduler.warmup-steps", 5, "--checkpoint.interval", 10)
PATIENT = ("--hub.heartbeat-timeout-seconds", 120, "--hub.stall-floor-seconds", 120)
"""Nobody is taken for lost because the machine is slow."""


def run(words):
    done = run_warm(*words, env=ENVIRONMENT, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_tutorial(tmp_path, monkeypatch, programs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tokenize,), ((_, *host),), joins = marked(PAGE, "tokens"), marked(PAGE, "hub"), marked(PAGE, "join")
    ((_, *come_back),), (status,) = marked(PAGE, "come back"), marked(PAGE, "status")

    def has_happened(kind, **what):
        events = read_events(tmp_path / "runs/friends/events.jsonl")
        return any(
            isinstance(event, kind) and all(getattr(event, key) == what[key] for key in what) for event in events
        )

    run(tokenize)
    assert host[-2:] == ["--hub.port", "4222"]
    hub = programs("hub", *host[:-2], *FEWER_STEPS, *PATIENT)
    friends = {}
    for (_, verb, invite, *more), real in zip(joins, invites_of(hub), strict=True):
        assert invite == "thinpipe3:..."
        friends[more[1]] = programs(more[1], verb, real, *more)
    wait_until(lambda: has_happened(Saved))
    assert all(name in run(status) for name in friends)
    friends["carla"].stop()
    wait_until(lambda: has_happened(PeerLeft, peer="carla"))
    friends["carla"] = programs("carla again", *come_back)
    assert [program.finish() for program in (hub, *friends.values())] == [0] * 4
    assert has_happened(GenerationStarted, generation=2)
    assert "finished: the trained model is in runs/friends" in hub.printed
    assert_computed_again_to_the_same_bits(read_events(tmp_path / "runs/friends/events.jsonl"))
    generate, report, export = marked(PAGE, "end")
    assert run(generate).startswith("Alice looked at the Queen")
    run(report)
    assert "carla" in (tmp_path / "runs/friends/report/report.md").read_text()
    run(export)
    assert (tmp_path / "exported/model.safetensors").exists()


def assert_computed_again_to_the_same_bits(events):
    losses = {}
    for event in (event for event in events if isinstance(event, Step)):
        assert losses.setdefault(event.step, event.loss) == event.loss
    assert sorted(losses) == [*range(1, STEPS + 1)]
