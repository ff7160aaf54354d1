"""The hub's audit of losses: real processes that read real checkpoints."""

import shutil
import time
from dataclasses import replace

import pytest

from tests.programs import PATIENCE, steps_of
from thinpipe.checkpoint import Checkpoint
from thinpipe.core.event_text import format_event_line
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.swarm.hub.loss_audit import LossAudit
from thinpipe.training.trainer import Trainer

PEERS = ["anna", "zoe"]


@pytest.fixture
def finished(run_config):
    config = replace(run_config, training=replace(run_config.training, steps=6))
    Trainer(config).train()
    return config


@pytest.fixture
def committed(finished):
    return Checkpoint.open(checkpoints_path(finished.job.dump_folder) / "step-00000004")


def audit_in(folder, share=0.5, clock=time.monotonic):
    return LossAudit(folder / "audit", share=share, band=1e-3, clock=clock)


def wait_for(audit):
    until = time.monotonic() + PATIENCE
    while (found := audit.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_a_true_loss_is_confirmed_and_a_false_one_is_an_alarm_with_names(finished, committed, tmp_path):
    losses = {event.step: event for event in steps_of(finished)}
    time_s = 0.0
    audit = audit_in(tmp_path, clock=lambda: time_s)
    audit.on_commit(committed)
    shutil.rmtree(committed.path)  # old commits are removed while the audit reads
    audit.on_step(losses[4], PEERS)
    assert audit.poll() is None
    audit.on_step(losses[5], PEERS)
    true = wait_for(audit)
    assert (true.step, true.reported) == (5, losses[5].loss)
    assert true.recomputed == true.reported
    assert not true.is_disputed
    assert format_event_line(true).endswith(f"computed again by the hub: {losses[5].loss:.4f}")
    false = type(true)(**{name: getattr(true, name) for name in true.__struct_fields__} | {"reported": 2.41})
    assert false.is_disputed
    assert "ALARM: loss 2.4100 was reported" in format_event_line(false)
    assert "Either anna or zoe reports false losses" in format_event_line(false)
    assert type(true)(step=1, reported=1.0, recomputed=float("nan"), band=1, peers=[], seconds=1).is_disputed
    audit.close()
    assert not (tmp_path / "audit").exists()


def test_it_takes_its_share_of_the_time_and_no_more(finished, committed, tmp_path):
    losses, now = steps_of(finished), [0.0]
    audit = audit_in(tmp_path, share=0.1, clock=lambda: now[0])
    audit.on_commit(committed)
    audit.on_commit(committed)  # the second is not started beside the first
    assert len(list((tmp_path / "audit").iterdir())) == 1
    for event in losses:
        audit.on_step(event, PEERS)
    now[0] = 5.0
    assert wait_for(audit).seconds == 5.0
    for later, is_started in ((49.9, False), (50.1, True)):
        now[0] = later
        audit.on_commit(committed)
        assert (tmp_path / "audit" / committed.path.name).exists() == is_started
    audit.close()
    never = audit_in(tmp_path, share=0.0)
    never.on_commit(committed)
    assert not (tmp_path / "audit").exists()


def test_a_damaged_commit_and_a_skipped_step_are_no_alarm(finished, committed, tmp_path, caplog):
    losses = {event.step: event for event in steps_of(finished)}
    (committed.path / "blocks.1.safetensors").write_bytes(b"damaged")
    audit = audit_in(tmp_path, share=1.0)
    audit.on_commit(committed)
    audit.on_step(losses[6], PEERS)  # and there is no step 5
    until = time.monotonic() + PATIENCE
    while "could not be recomputed" not in caplog.text:
        assert audit.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "blocks.1.safetensors is missing or cut short" in caplog.text
