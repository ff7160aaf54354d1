"""Everything that comes from another machine, and what is done with it when it was accepted, without I/O."""

import io
import tomllib
from collections import namedtuple
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from tests.swarm.judged import SEGMENTS, layout
from thinpipe.checkpoint.distributed import Candidate, Written
from thinpipe.checkpoint.storage import Manifest, received_manifest
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.events import TrainingEvent
from thinpipe.core.exactness import Exactness
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.core.numerics import numerics, numerics_mismatch
from thinpipe.models.hf.base_statement import BaseStatement
from thinpipe.planning.partition import SegmentNeeds, Traffic, make_partition
from thinpipe.subspace.grassmann import BasisUpdate
from thinpipe.swarm.hub.assignments import forecast, make_assignment, start_event
from thinpipe.swarm.hub.commits.interval import StepTimeEstimator, plan_commits, predict_step_seconds
from thinpipe.swarm.hub.commits.ledger import CommitLedger, Part
from thinpipe.swarm.hub.conduct import Conduct
from thinpipe.swarm.hub.disconnects import Connections, DisconnectEvent
from thinpipe.swarm.hub.event_validation import validated_event
from thinpipe.swarm.hub.liveness import Heartbeats
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.replica import Generation
from thinpipe.swarm.hub.run_host import GenerationStart
from thinpipe.swarm.hub.services.reduction import ReductionError, StepReduction
from thinpipe.swarm.hub.slow_readers import WaitingBytes
from thinpipe.swarm.hub.stalls import StallDetector
from thinpipe.swarm.hub.suspects import Suspects
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.peer.hub_settings import settings_from_hub
from thinpipe.swarm.protocol.file_messages import ReadReply, ReadRequest, WriteReply, WriteRequest
from thinpipe.swarm.protocol.invite import PackedInvite
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import (
    AdminAnswer,
    AdminRequest,
    AnnouncementReply,
    Answer,
    Assignment,
    CheckpointAnnouncement,
    EventReport,
    InviteCheck,
    InviteState,
    JoinAnswer,
    JoinRequest,
    LeaveRequest,
    Measure,
    NextRequest,
    Note,
    ReachReply,
    ReachRequest,
    ReadyReply,
    ReadyRequest,
    RenewReply,
    TokensRequest,
)
from thinpipe.swarm.protocol.probe import Probe
from thinpipe.swarm.protocol.reduction import ReduceReply, ReduceRequest
from thinpipe.swarm.protocol.signed_files import Occasion, Provenance, first_unsigned
from thinpipe.swarm.protocol.status import PeerStatus, Status, machines_from_status, render
from thinpipe.training.base_hash import BaseHashes
from thinpipe.training.data_loading import DatasetInfo, token_dtype
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.broadcasts import GenerationOver, PeerLost
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest

NAMES = ["p0", "mallory"]
KEY = KeyPair.new()
STATE_NBYTES = (1e6, 1e6, 2e9)
NEEDS = [SegmentNeeds(flops_per_token=1e6, memory_nbytes=1 << 20) for _ in STATE_NBYTES]
Door = namedtuple("Door", "kind form process", defaults=("msgpack", lambda _: None))


def partition(machines, up_bps, down_bps):
    traffic = Traffic(forward_nbytes=34, backward_nbytes=32)
    return make_partition(NEEDS, machines, traffic, hub_up_bps=up_bps, hub_down_bps=down_bps, shared_nbytes=0)


def process_next_request(request):
    """The request of one peer beside an honest one: measured, assigned, forecast, planned, shown."""
    honest = request if request.report is None else msgspec.structs.replace(request, report=None)
    assert isinstance(numerics_mismatch(request.numerics, numerics()), str)
    conduct = Conduct(lambda: NAMES, Suspects(Suspensions()))

    def judge(_generation, name, request, leaving):
        return conduct.end_by_request(name, request, leaving, 0.0)

    membership = Membership(
        wanted=1, partitioner=partition, patience_seconds=0.0, suspensions=conduct.suspects.suspensions, judge=judge
    )
    membership.on_next_request("p0", msgspec.structs.replace(honest, accusation=None), 0.0)
    for now in range(4):
        found = membership.next_for("mallory", float(now))
        if isinstance(found, Measure) and not found.concurrent:
            break
        membership.on_next_request("mallory", request, float(now))
        membership.on_next_request("mallory", msgspec.structs.replace(request, left_generation=0), float(now))
        membership.drop_peer("p0", "left")
        found = membership.next_for("mallory", float(now))
        if isinstance(found, Generation):
            begin(found, membership)
            conduct.begin(found, layout((SEGMENTS,)), 0)
            membership.on_next_request("mallory", request, now + 0.5)
            conduct.on_return("mallory", request, now + 0.5)
            show(Status(**EMPTY_STATUS | {"peers": [], "suspended": conduct.suspects.suspensions.in_words(now + 0.5)}))
            for event in conduct.pop_events(0):
                format_event(event)
    peers = [PeerStatus(name="mallory", segments=1, report=request.report)]
    show(Status(**EMPTY_STATUS | {"peers": peers, "hub_bps": request.concurrent_bps}))


EMPTY_STATUS = {
    "run": "r", "generation": 1, "waits_for": "", "absent": [], "bottleneck": "", "hub_bps": None, "progress": {},
}  # fmt: skip


def begin(generation, membership):
    """As the hub begins a generation, with the numbers of its run host."""
    expected = forecast(generation, membership.present)
    step_seconds = predict_step_seconds(
        tokens=1 << 16,
        tokens_per_second=expected.tokens_per_second,
        microbatches=4,
        peers=len(generation.names),
        latency_s=expected.latency_s,
    )
    assert step_seconds > 0
    plan = plan_commits(
        state_nbytes=STATE_NBYTES[: len(generation.names)],
        up_bps=expected.up_bps,
        hub_down_bps=expected.hub_down_bps,
        share=0.25,
        step_seconds=StepTimeEstimator().begin(step_seconds),
        max_steps=10_000,
    )
    plan.in_words(step_seconds)
    format_event(start_event(generation, membership.present, 3, who_reads=""))
    rates = dict(zip(generation.names, plan.bytes_per_second, strict=True))
    start = GenerationStart(
        settings="",
        manifest=b"",
        dataset_info=b"",
        tokenizer=[],
        upload_bytes_per_second=rates,
        step_layout=layout((SEGMENTS,)),
    )
    message = make_assignment(generation, start, commit_plan="", diverged_steps=[])
    assert decode_foreign(msgspec.msgpack.encode(message), Answer) == message, "what the hub says passes its own bounds"


def process_heartbeat(heartbeat):
    stalls, heartbeats = StallDetector(factor=3, floor_seconds=1, startup_seconds=9), Heartbeats(5.0)
    stalls.begin(heartbeat.generation, {"mallory": 1, "p0": 2}, 0.0)
    for now in (1.0, 2.0):
        heartbeats.on_heartbeat("mallory", now)
        stalls.on_heartbeat("mallory", heartbeat)
        stalls.on_heartbeat("p0", Heartbeat(generation=heartbeat.generation))
        list(stalls.stalled(now))
        stalls.deadlock_seconds()
        list(heartbeats.newly_timed_out(now + 10))


def process_event(event):
    try:
        event = validated_event(msgspec.json.encode(event))
    except ProtocolError:
        return
    format_event(event)
    Exactness().on_event(event)
    estimator = StepTimeEstimator()
    estimator.begin(1.0)
    for _ in range(6):
        median = estimator.add(getattr(event, "seconds", 1.0))
        if median is not None:
            plan_commits(
                state_nbytes=[1e9], up_bps=[1e6], hub_down_bps=1e9, share=0.25, step_seconds=median, max_steps=1000
            ).in_words(median)
    predicted = estimator.begin(1.0)
    if predicted > 0:
        plan_commits(
            state_nbytes=[1e9], up_bps=[1e6], hub_down_bps=1e9, share=0.25, step_seconds=predicted, max_steps=1000
        )
    decode_foreign(msgspec.json.encode(event), TrainingEvent, form="json")


def process_manifest(manifest):
    """As a peer reads the manifest that the hub sends."""
    try:
        received_manifest(msgspec.json.encode(manifest.with_checksum()))
    except ProtocolError:
        return


def process_announcement(announced):
    """Announced by a peer that holds all of its files, beside one that announces the same."""
    files = {file.name: file for file in announced.files}
    ledger = CommitLedger()
    ledger.begin(1, {name: list(files) for name in NAMES})
    occasion = Occasion(run="00", generation=announced.generation, step=announced.step)
    assert first_unsigned(announced.files, KEY.public_key, occasion) or not files
    for name in NAMES:
        part = Part(
            step=announced.step,
            samples_seen=announced.samples_seen,
            basis_version=announced.basis_version,
            basis_sha256=announced.basis_sha256,
            files=files,
        )
        try:
            ledger.announce(name, 1, part, 0.0)
        except UserError:
            return
        ledger.foreign_files(name, files)
    ledger.owed()


def process_provenance(provenance):
    provenance.unproven(dict.fromkeys(provenance.makers, (1, "00")), "00", 1)


def process_reduction(request):
    reduction = StepReduction(request.generation, NAMES)
    for name in NAMES:
        try:
            with np.errstate(all="ignore"):
                reduction.contribute(
                    name, request.generation, request.round_number, request.op, np.frombuffer(request.values, "<f8")
                )
        except ReductionError:
            return


def show(status):
    output = io.StringIO()
    Console(file=output, width=200, highlight=False).print(render(status))
    assert all(letter.isprintable() or letter == "\n" for letter in output.getvalue())
    try:
        machines_from_status(status, "fp32")
    except UserError:
        return


def process_answer(answer):
    if isinstance(answer, Assignment | Measure):
        process_settings(answer.settings)
    if isinstance(answer, Assignment):
        assert len(answer.names) == len(answer.shares) == len(answer.incarnations)


def process_settings(text):
    try:
        settings_from_hub(text, Path("mine"), "cpu")
    except (ProtocolError, UserError):
        return


def process_base(statement):
    assert len(statement.base_sha256) == 64
    assert sum(tensor.nbytes for tensor in statement.of_segments(range(4096))) >= 0


def process_dataset_info(info):
    token_dtype(info.vocab_size)


DOORS = {
    **{kind.__name__: Door(kind) for kind in (
        # peer to hub
        ReadyRequest, LeaveRequest, TokensRequest, EventReport, AdminRequest, JoinRequest, InviteCheck, ReachRequest,
        StoreRequest, Probe,
        # hub to peer
        ReadyReply, AnnouncementReply, AdminAnswer, JoinAnswer, InviteState, RenewReply, ReachReply, StoreReply,
        ReduceReply, ReadReply, WriteReply, Note,
        PeerLost, GenerationOver,
        # peer to peer
        BasisUpdate,
    )},
    "ReadRequest": Door(ReadRequest),
    "WriteRequest": Door(WriteRequest),
    "NextRequest": Door(NextRequest, process=process_next_request),
    "Heartbeat": Door(Heartbeat, process=process_heartbeat),
    "ReduceRequest": Door(ReduceRequest, process=process_reduction),
    "TrainingEvent": Door(TrainingEvent, "json", process_event),
    "CheckpointAnnouncement": Door(CheckpointAnnouncement, process=process_announcement),
    "Provenance": Door(Provenance, "json", process_provenance),
    "Manifest": Door(Manifest, "json", process_manifest),
    "Answer": Door(Answer, process=process_answer),
    "Status": Door(Status, process=show),
    "DatasetInfo": Door(DatasetInfo, "json", process_dataset_info),
    "Written": Door(Written, "json"),
    "Candidate": Door(Candidate, "json"),
    "BaseHashes": Door(BaseHashes, "json"),
    "BaseStatement": Door(BaseStatement, "json", process_base),
    "DisconnectEvent": Door(DisconnectEvent, "json"),  # of the server
    "Connections": Door(Connections, "json"),
    "WaitingBytes": Door(WaitingBytes, "json"),
    "PackedInvite": Door(PackedInvite),  # of a person
}  # fmt: skip
"""By the name under which the type is decoded."""

SETTINGS = tomllib.loads(dump_toml(RunConfig()))
