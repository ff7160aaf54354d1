"""One `thinpipe join` lends two cards of a machine, beside a peer on a CPU of another class: who may replace whom."""

import os
import signal
from dataclasses import replace

import psutil
import pytest

from tests.device.sim import environment
from tests.programs import (
    events_of,
    files_of,
    hub_arguments,
    invites_of,
    newest_step,
    run_to_end,
    steps_of,
    train_until,
    wait_for_event,
)
from tests.swarm.commits import wait_until
from thinpipe.config.hub import JoinConfig
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import Step
from thinpipe.core.hub_events import ExactnessLost, GenerationStarted, PeerLeft
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.report.summary import summarise
from thinpipe.swarm.peer import cards
from thinpipe.swarm.protocol.messages import EXIT_TEMPFAIL

UNLIKE = {"ATEN_CPU_CAPABILITY": "default"}
"""A CPU without vector instructions, whose products differ in the last digits."""


def hosted(config, tmp_path):
    """The run for a hub, deterministic, of more steps than anyone waits for, with a commit every 8; and its file."""
    config = replace(
        config,
        job=JobConfig(dump_folder=tmp_path / "hub_run"),
        training=replace(config.training, steps=100_000),
        checkpoint=CheckpointConfig(interval=8, keep_latest_k=0),
        debug=replace(config.debug, deterministic=True),
    )
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    return config, file


def process_of(lender, device):
    """The process that lends this card."""
    found = psutil.Process(lender.process.pid).children()
    return next(child for child in found if device in child.cmdline())


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.long)], ids=["exact", "not exact"])
def test_after_a_kill_the_numbers_are_those_that_the_class_promises(sim, run_config, tmp_path, programs, exact):  # noqa: ARG001
    config, file = hosted(run_config, tmp_path)
    flags = ("--hub.invites", 3, "--hub.patience-seconds", 2, *(("--hub.exact",) if exact else ()))
    hub = programs("hub", *hub_arguments(file, 2, *flags))
    invites = invites_of(hub)
    arguments = ("join", *invites[:2], "--device", "sim", "--name", "box", "--folder", tmp_path / "box")
    box = programs("box", *arguments, environment=environment(SIM_DEVICES=2))
    first = wait_for_event(config, GenerationStarted, generation=1)
    assert {peer.name for peer in first.peers} == {"box1", "box2"}
    assert len({peer.device_class for peer in first.peers}) == 1
    assert first.peers[0].device_class.startswith("sim: simulated device, deterministic, torch ")
    cpu = programs(
        "cpu", "join", invites[2], "--device", "cpu", "--name", "cpu", "--folder", tmp_path / "cpu", environment=UNLIKE
    )
    cpu.until("hub.exact is set, and its device does not compute the same bits" if exact else "cpu is a standby")
    process_of(box, "sim:1").send_signal(signal.SIGKILL)

    second = wait_for_event(config, GenerationStarted, generation=2)
    assert [peer.name for peer in second.peers if exact] == (["box1"] if exact else [])
    assert exact or {peer.name for peer in second.peers} == {"box1", "cpu"}
    code, printed = run_to_end("status", config.job.dump_folder)
    assert f"numbers: {'exact' if exact else ''}" in printed, (code, printed)
    target = second.step + 16
    wait_until(lambda: newest_step(config) >= target)
    hub.process.send_signal(signal.SIGINT)
    assert hub.finish() == 0, hub.printed
    assert box.finish() == 1, "of the card whose process was killed"
    assert "sim:1: its process was ended by SIGKILL; other cards go on" in box.printed
    assert cpu.finish() == EXIT_TEMPFAIL, cpu.printed

    twin = replace(config, job=run_config.job, training=replace(config.training, device="sim"))
    with deterministic_algorithms(True):
        train_until(twin, target)
    numbers = {step.step: (step.loss, step.grad_norm) for step in steps_of(twin)}
    found = [(numbers[step.step], (step.loss, step.grad_norm)) for step in steps_of(config) if step.step <= target]
    lost, words = events_of(config, ExactnessLost), summarise(config.job.dump_folder).exactness
    if exact:
        assert (lost, words[:6]) == ([], "exact:")
        assert all(ours == theirs for theirs, ours in found)
        assert files_of(config, target) == files_of(twin, target)
    else:
        assert [event.step for event in lost] == [second.step]
        assert "no longer bit for bit what an undisturbed run computes: segment " in hub.printed
        assert words.startswith(("within ", "unknown since"))
        assert files_of(config, target) != files_of(twin, target), "the CPU is of another class indeed"
        assert all(ours == pytest.approx(theirs, rel=1e-3) for theirs, ours in found)


@pytest.mark.long
def test_all_cards_leave_together_and_come_back_with_their_folders(sim_library, run_config, tmp_path, programs):  # noqa: ARG001
    config, file = hosted(run_config, tmp_path)
    hub = programs("hub", *hub_arguments(file, 2))
    flags, sim = ("--device", "sim"), environment(SIM_DEVICES=2)
    box = programs("box", "join", *invites_of(hub), *flags, "--folder", tmp_path / "box", environment=sim)
    started = wait_for_event(config, GenerationStarted, generation=1)
    wait_for_event(config, Step, after=started)
    box.process.send_signal(signal.SIGINT)
    assert box.finish() == 0, box.printed
    assert {event.cause for event in events_of(config, PeerLeft)} == {"left"}
    for device in ("sim:0", "sim:1"):
        assert f"{device}: leaving the run; `thinpipe join {tmp_path / 'box'}" in box.printed
    saved = newest_step(config)
    assert saved > 0

    again = programs("again", "join", tmp_path / "box/0", tmp_path / "box/1", *flags, environment=sim)
    resumed = wait_for_event(config, GenerationStarted, generation=2)
    assert resumed.step == saved
    wait_for_event(config, Step, after=resumed)
    orphans = [process_of(again, device) for device in ("sim:0", "sim:1")]
    os.kill(again.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(orphan.is_running() for orphan in orphans))
    assert [event.cause for event in events_of(config, PeerLeft)] == ["left"] * 4
    assert newest_step(config) > saved, "without their parent they saved, and left"


@pytest.mark.parametrize("device", ["cpu", "sim:0", "auto"])
def test_there_is_a_card_for_each_invite(sim, device):  # noqa: ARG001
    invites = ("b", "c") if device == "auto" else ("b",)
    with pytest.raises(UserError, match=f"invites are for . cards, and --device {device} has [12] here"):
        cards.run(JoinConfig(invite="a", more=invites, device=device))
