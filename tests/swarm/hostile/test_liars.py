"""A peer that trains against the run and tells losses that fall: what its owner saw was a run that learns. The hub
computes losses again from its own commits, and names who can have told a false one."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.liars import lies
from tests.programs import run_to_end
from thinpipe.config.run import ValidationConfig
from thinpipe.core.audit_events import BoundaryAlarm, CommitMeasured, LayersUnchanged, LossRecomputed
from thinpipe.core.events import read_events
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.core.run_folder import events_path

RECOMPUTED = r"computed again by the hub: \d"


@pytest.fixture
def run_config(run_config):
    """Two segments for two peers, of which the faster one gets the last."""
    return replace(
        run_config,
        model=replace(run_config.model, boundaries=(2,)),
        training=replace(run_config.training, precision="fp32"),
        validation=ValidationConfig(freq=0),
        checkpoint=replace(run_config.checkpoint, interval=10),
    )


def events_of(run_config, *kinds):
    return [event for event in read_events(events_path(run_config.job.dump_folder)) if isinstance(event, kinds)]


@pytest.mark.parametrize(
    "lie",
    [pytest.param(lies.climbing, marks=pytest.mark.long), lies.false_loss],
    ids=["climbing", "false loss"],
)
def test_a_careful_liar_is_named(lie, run_config, start_hub, join, join_dishonestly):
    hub, invites = start_hub(2, "--hub.audit-share", "1")
    join(invites[0], "anna")
    mallory = join_dishonestly(invites[1], "mallory", lie)
    hub.until(r"generation 1 starts from step 0: anna \(.*mallory \(")
    named = hub.until(
        r"ALARM: loss (\S+) was reported, and the hub computes (\S+) from its commit\. Either (\S+) reports"
    )
    assert named[3] == "mallory"
    assert named[1] != named[2]
    assert events_of(run_config, LossRecomputed)[0].is_disputed, "the first loss that is computed again"
    _, findings = run_to_end("doctor", "--invite", run_config.job.dump_folder, "--json")
    (members,) = (finding for finding in json.loads(findings) if finding["what"] == "members")
    assert members["state"] == "warning"
    assert re.match(r"\d+ alarm\(s\): what members reported cannot be true", members["text"])
    assert hub.process.poll() is None
    assert mallory.process.poll() is None, "an alarm is for the owner: it removes nobody"


@pytest.mark.long
def test_a_peer_that_never_updates_its_weights_is_named(run_config, start_hub, join, join_dishonestly):
    hub, invites = start_hub(2, "--hub.audit-share", "1")
    join(invites[0], "anna")
    join_dishonestly(invites[1], "mallory", lies.frozen_layers)
    named = hub.until(r"ALARM: (.+) hardly changed between the commits of steps \d+ and \d+, .*: (\S+) did not train")
    assert named[2] == "mallory"
    (started, *_) = events_of(run_config, GenerationStarted)
    assert started.peers[-1].name == "mallory"
    assert "last" in named[1]
    assert "first" not in named[1]


def test_honest_peers_raise_no_alarm(run_config, start_hub, join):
    hub, invites = start_hub(2, "--hub.audit-share", "1")
    for name, invite in zip(("anna", "bert"), invites, strict=True):
        join(invite, name)
    hub.until(rf"(?s)({RECOMPUTED}.*){{3}}")
    assert "ALARM" not in hub.printed
    audits = events_of(run_config, LossRecomputed)
    assert audits
    assert all(audit.recomputed == audit.reported for audit in audits), "devices are alike: to the bit"
    (started,) = events_of(run_config, GenerationStarted)
    assert {name for audit in audits for name in audit.peers} == {started.peers[-1].name}
    assert events_of(run_config, CommitMeasured)
    assert not events_of(run_config, BoundaryAlarm, LayersUnchanged)
    assert len(re.findall(RECOMPUTED, hub.printed)) >= 3, "shown to the owner"
