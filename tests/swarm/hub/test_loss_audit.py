"""The hub's audit of losses: real processes that read real checkpoints."""

import shutil
import time
from dataclasses import replace

import msgspec
import pytest

from tests.programs import PATIENCE, steps_of
from thinpipe.checkpoint import Checkpoint
from thinpipe.core.audit_events import CommitMeasured, LossRecomputed
from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import Step
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.swarm.hub.commit_losses import MeasuredCommit
from thinpipe.swarm.hub.loss_audit import LossAudit, open_audit
from thinpipe.training.trainer import Trainer

PEERS = ["anna", "zoe"]
"""In pipeline order: zoe computes the loss."""


@pytest.fixture
def finished(run_config):
    config = replace(run_config, training=replace(run_config.training, steps=6))
    Trainer(config).train()
    return config


@pytest.fixture
def committed(finished):
    return Checkpoint.open(checkpoints_path(finished.job.dump_folder) / "step-00000004")


def audit_in(folder, share=1.0, clock=time.monotonic):
    return LossAudit(folder / "audit", share=share, band=1e-3, clock=clock)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_a_true_loss_is_confirmed_and_a_false_one_is_an_alarm_with_names(finished, committed, tmp_path):
    losses = {event.step: event for event in steps_of(finished)}
    audit = audit_in(tmp_path)
    audit.reported.on_generation(0, PEERS)
    audit.on_commit(committed)
    until((tmp_path / "audit" / committed.path.name / "manifest.json").exists)
    shutil.rmtree(committed.path)  # old commits are removed while the audit reads
    audit.on_step(losses[4])
    until(lambda: not audit._commit_losses._thread.is_alive())
    assert audit.poll() == []
    audit.on_step(losses[5])
    true, measured = audit.poll()
    assert (true.step, true.reported) == (5, losses[5].loss)
    assert true.recomputed == true.reported
    assert not true.is_disputed
    assert format_event_line(true).endswith(f"computed again by the hub: {losses[5].loss:.4f}")
    assert (measured.step, measured.reported) == (4, losses[4].loss)
    assert not measured.is_disputed
    assert f"{losses[5].loss:.4f} reported, {losses[5].loss:.4f} recomputed by the hub" in audit.summary
    false = msgspec.structs.replace(true, reported=2.41)
    assert false.is_disputed
    assert "ALARM: loss 2.4100 was reported" in format_event_line(false)
    assert "Either zoe reports false losses" in format_event_line(false)
    assert LossRecomputed(step=1, reported=1.0, recomputed=float("nan"), band=1, peers=[], seconds=1).is_disputed
    audit.close()
    assert not (tmp_path / "audit").exists()


def test_it_takes_its_share_of_the_time_and_no_more(finished, committed, tmp_path):
    now = [0.0]
    audit = audit_in(tmp_path, share=0.1, clock=lambda: now[0])
    audit.on_commit(committed)
    assert not audit._commit_losses.is_running, "not at once"
    now[0] = 45.1
    audit.on_commit(committed)
    first = audit._commit_losses._thread
    audit.on_commit(committed)  # the second is not started beside the first
    assert audit._commit_losses._thread is first
    for event in steps_of(finished):
        audit.on_step(event)
    now[0] += 5.0
    assert until(audit.poll)[0].seconds == 5.0
    for later, is_started in ((95.0, False), (95.2, True)):
        now[0], audit._last_measured = later, -1
        audit.on_commit(committed)
        assert audit._commit_losses.is_running == is_started
    audit.close()
    never = audit_in(tmp_path, share=0.0)
    never.on_commit(committed)
    assert not never._commit_losses.is_running
    assert never.poll() == []


def test_a_commit_that_is_gone_and_one_that_is_damaged_are_no_alarm(committed, tmp_path, caplog):
    audit = audit_in(tmp_path, share=1.0)
    (committed.path / "blocks.1.safetensors").write_bytes(b"damaged")
    for problem in ("blocks.1.safetensors is missing or cut short", "manifest"):
        audit.on_commit(committed)
        until(lambda: audit.poll() == [] and not audit._commit_losses.is_running)
        assert problem in caplog.text
        assert "FAILED: the loss of step 5 could not be computed again" in audit.summary
        assert problem in audit.summary
        shutil.rmtree(committed.path, ignore_errors=True)
        audit._last_measured = -1


def test_without_links_it_reads_the_commit_itself(finished, committed, tmp_path, monkeypatch):
    """A full disk, or a file system that has none."""

    def fail(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.link", fail)
    audit = audit_in(tmp_path)
    audit.on_commit(committed)
    for event in steps_of(finished):
        audit.on_step(event)
    assert until(audit.poll)[0].is_disputed is False
    assert committed.path.exists()
    audit.close()


def test_its_process_ends_with_the_audit(committed, tmp_path):
    audit = audit_in(tmp_path)
    audit.on_commit(committed)
    process = until(lambda: audit._commit_losses._process)
    audit.close()
    assert process.poll() is not None
    assert not audit._commit_losses._thread.is_alive()


class Found:
    """In place of the process: what it would have found."""

    def __init__(self):
        self.result, self.is_running = None, False

    def start(self, _checkpoint):
        self.is_running = True

    def poll(self):
        if self.result is None:
            return None
        found, self.result, self.is_running = self.result, None, False
        return found, 1.0


@pytest.fixture
def told(tmp_path):
    audit = LossAudit(tmp_path / "audit", share=1.0, band=1e-3)
    audit._commit_losses = Found()
    audit.reported.on_generation(0, PEERS)
    return audit


def step(number, loss):
    return Step(step=number, loss=loss, grad_norm=1.0, lr=1e-3, tokens=number, seconds=1.0, tokens_per_second=1.0)


def test_who_is_honest_only_after_commits_is_seen_by_the_hubs_own_batch(told):
    """The loss of the step after each commit is true; the others fall, and the weights get worse."""
    alarms = []
    for commit in range(10, 200, 10):
        truth = 6.0 + commit / 100
        for number in range(commit - 8, commit + 1):
            told.on_step(step(number, 6.0 - number / 100))
        told.on_step(step(commit + 1, truth))
        jitter = 0.01 * (-1) ** (commit // 10)
        told._commit_losses.result = MeasuredCommit(step=commit, next_step=truth, own_batch=truth + jitter)
        again, measured = told.poll()
        assert not again.is_disputed
        alarms.append(measured.is_disputed)
        if measured.is_disputed:
            assert "Either zoe reports false losses" in format_event_line(measured)
    assert alarms == [False] * 4 + [True] * (len(alarms) - 4), "it is certain once it knows how batches differ"


def test_honest_losses_are_no_alarm_however_batches_differ(told):
    """The hub's own batch is harder than others, and training forgets for a while."""
    for commit in range(10, 300, 10):
        truth = 6.0 - commit / 100 + (1.0 if 100 <= commit < 150 else 0.0)
        for number in range(commit - 9, commit + 2):
            told.on_step(step(number, truth + 0.05 * (-1) ** number))
        own = truth + 0.3 + 0.05 * (-1) ** (commit // 10)
        told._commit_losses.result = MeasuredCommit(
            step=commit, next_step=truth + 0.05 * (-1) ** (commit + 1), own_batch=own
        )
        assert not any(event.is_disputed for event in told.poll())


def test_what_was_reported_before_a_roll_back_is_not_compared(told):
    for number in range(1, 22):
        told.on_step(step(number, 5.0))
    told.reported.on_generation(10, ["zoe", "bert"])
    told._commit_losses.result = MeasuredCommit(step=20, next_step=4.0, own_batch=4.0)
    assert told.poll() == [], "step 21 of the run as it stands has not been reported"
    for number in range(11, 22):
        told.on_step(step(number, 4.0))
    again, measured = told.poll()
    assert (again.reported, again.peers, measured.peers) == (4.0, ["bert"], ["bert"])


def test_a_commit_that_was_given_up_is_not_compared(told, committed):
    told._commit_losses.is_running = True
    older = msgspec.structs.replace(committed.manifest, step=3)
    told.on_generation(Checkpoint(committed.path, older), PEERS, {})
    told._commit_losses.result = MeasuredCommit(step=4, next_step=4.0, own_batch=4.0)
    told.on_step(step(5, 9.0))
    assert told.poll() == []


def test_the_hubs_own_batch_stays_the_same(run_config):
    first, second = (open_audit(run_config, share=1.0)._commit_losses._place for _ in range(2))
    assert first == second
    assert (run_config.job.dump_folder / "hub" / "own_batch").read_text() == str(first)


def test_an_unknown_margin_disputes_nothing_but_nonsense():
    measured = CommitMeasured(
        step=1, loss=9.0, reported=1.0, expected_difference=None, margin=None, peers=PEERS, seconds=1.0
    )
    assert not measured.is_disputed
    assert msgspec.structs.replace(measured, loss=float("nan")).is_disputed
