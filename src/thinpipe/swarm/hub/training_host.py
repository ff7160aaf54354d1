"""The training run hosted by a hub: settings, data, partitioning and commits of checkpoints. Computes no training
steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, restore
from thinpipe.checkpoint.codec_state import segment_of_codec_state
from thinpipe.checkpoint.storage import layer_of
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.audit_events import AuditEvent
from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import AnyEvent, Saved, SaveFailed, Started, Step, Stopped
from thinpipe.core.exactness import exactness_of
from thinpipe.core.hashing import text_sha256
from thinpipe.core.hub_events import CheckpointAbandoned, GenerationEnded, HubEvent
from thinpipe.core.numerics import numerics
from thinpipe.core.run_folder import checkpoints_path, events_path, step_folder
from thinpipe.data import Cursor
from thinpipe.planning.partition import Machine, Partition, make_partition
from thinpipe.swarm.hub.commits.interval import (
    CommitPlan,
    StepTimeEstimator,
    plan_commits,
    predict_step_seconds,
)
from thinpipe.swarm.hub.commits.log import COMMIT_LOG_FILE, CommitLog
from thinpipe.swarm.hub.commits.recovery import NEWEST_MANIFEST_FILE, find_newest
from thinpipe.swarm.hub.commits.store import CommitStore
from thinpipe.swarm.hub.commits.watchdog import CommitWatchdog
from thinpipe.swarm.hub.delayed_events import DelayedEvents
from thinpipe.swarm.hub.first_checkpoint import make_first_checkpoint
from thinpipe.swarm.hub.kept_ends import partition_with_kept_ends
from thinpipe.swarm.hub.loss_audit import open_audit
from thinpipe.swarm.hub.replica import Generation
from thinpipe.swarm.hub.run_host import GenerationForecast, GenerationStart
from thinpipe.swarm.hub.run_model import describe_model, open_base
from thinpipe.swarm.hub.run_settings import refuse_large_batches, reject_unused_settings, settings_for_peers
from thinpipe.swarm.hub.services.files import FileRange
from thinpipe.swarm.hub.step_record import make_step_layout
from thinpipe.swarm.hub.who_reads import who_reads
from thinpipe.swarm.protocol.messages import MAX_UPLOAD_SECONDS, Measure
from thinpipe.training.console import Display
from thinpipe.training.data_loading import LocalTokens, refuse_other_data, token_dtype, tokenizer_sha256

_BASE_PATIENCE = 3.0
"""As many times as long as the measured rates say may the download of a base take."""
_SHORTEST_SHARE = 0.1
"""Part of the mean seconds per step, by the hub's clock, that a step takes at least."""


class TrainingHost(CommitStore):
    """Implements `hub.run_host.RunHost`. `display` shows the events reported by the first peer."""

    def __init__(
        self,
        config: RunConfig,
        display: Display,
        *,
        use_all_peers: bool = False,
        audit_share: float = 0.0,
        keep_ends: Sequence[str] = (),
    ) -> None:
        self.use_all_peers, self.keep_ends = use_all_peers, keep_ends
        reject_unused_settings(config)
        self.display, self.numerics = display, numerics()
        self.source = LocalTokens(config)
        info = self.source.dataset_info
        refuse_large_batches(config, info.vocab_size, chats=info.chats)
        folder = CheckpointFolder(checkpoints_path(config.job.dump_folder))
        kept = config.checkpoint.keep_latest_k
        log = CommitLog(config.job.dump_folder / COMMIT_LOG_FILE, max_records=kept + 1 if kept else 0)
        newest, notices = find_newest(folder, config.job.dump_folder / NEWEST_MANIFEST_FILE, log.history)
        if newest is not None and newest.manifest.step:
            refuse_other_data(newest, info, config.data)
        self.base = open_base(config, info.vocab_size, newest)
        if self.base is not None:
            config = replace(config, model=replace(config.model, hf=self.base.source))
        newest = newest or make_first_checkpoint(config, info, folder, self.base)
        super().__init__(config, folder, newest, log, notices)
        self.run_model = describe_model(self.newest, config, self.base, chats=info.chats)
        self.model = self.run_model.config
        self.measure = Measure(
            concurrent=False,
            settings=dump_toml(settings_for_peers(config)),
            dim=self.model.dim,
            heads=self.run_model.heads,
        )
        self.who_reads = who_reads(self.model, config.boundary, chats=info.chats, keep_ends=keep_ends)
        self.exactness = exactness_of(events_path(config.job.dump_folder))
        self._delayed_events = DelayedEvents(events_path(config.job.dump_folder), self._report_log_problem)
        self.tokenizer = _tokenizer_files(self.source.tokenizer_folder)
        self.source.save_tokenizer(config.job.dump_folder)
        self._step: Step | None = None
        self._plan: CommitPlan | None = None
        self._step_seconds = StepTimeEstimator()
        self._begun_step, self._begun = self.committed, time.monotonic()
        self._reported_at = self._begun
        """From which step and when the generation began, and when its newest step was reported."""
        self._watchdog = CommitWatchdog(self.committed)
        self._upload_seconds: dict[str, float] = {}
        """Seconds that each peer of the generation may take to upload its files."""
        self._audit, self.alarms = open_audit(config, share=audit_share), 0
        self._abandoned_by = frozenset[str]()
        """Peers of the last `CheckpointAbandoned` since the newest commit."""

    def pop_notices(self) -> list[str]:
        for event in self._audit.poll():
            self._record(event)
        notices, self._notices = self._notices, []
        return notices

    def make_partition(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Partition:
        partition = partial(
            make_partition,
            self.run_model.needs,
            traffic=self.run_model.traffic,
            hub_up_bps=hub_up_bps,
            hub_down_bps=hub_down_bps,
            shared_nbytes=self.run_model.shared_nbytes,
            max_machines=self._max_peers,
            use_all_peers=self.use_all_peers,
        )
        return partition_with_kept_ends(machines, self.keep_ends, len(self.run_model.needs), partition)

    @property
    def _max_peers(self) -> int | None:
        """Maximum number of peers in a generation: 1F1B needs at least one micro-batch per stage."""
        return self.config.microbatches if self.config.parallelism.pipeline_parallel_schedule == "1F1B" else None

    def begin(self, generation: Generation, forecast: GenerationForecast | None = None) -> GenerationStart:
        if self.base is not None:
            self.base.refuse_changed()
        held = {
            name: [file for segment in segments for file in self.run_model.files_of_segments[segment]]
            for name, segments in generation.partition.stages
        }
        self.begin_commits(generation.number, held)
        self._watchdog.begin(time.monotonic(), self.config.parallelism.timeout_seconds)
        self._begun_step, self._begun = self.committed, time.monotonic()
        self._reported_at = self._begun
        layers = {name: [layer_of(file) for file in files] for name, files in held.items()}
        self._audit.on_generation(self.newest, generation.names, layers)
        shares = list(generation.shares.values())
        self._plan = None if forecast is None else self._plan_commits(shares, forecast)
        self._upload_seconds = (
            {} if self._plan is None else dict(zip(generation.names, self._plan.deadlines, strict=True))
        )
        interval = self.config.checkpoint.steps if self._plan is None else self._plan.interval
        patient = self.config
        if forecast is not None:
            parallelism = self.config.parallelism
            seconds = parallelism.timeout_seconds + self._base_seconds(generation, forecast)
            patient = replace(patient, parallelism=replace(parallelism, timeout_seconds=seconds))
        settings = dump_toml(settings_for_peers(patient, shares, interval))
        space = self.run_model.make_space()
        restore(self.newest, {}, space)
        self._hashes = {"settings": text_sha256(settings), "tokenizer": tokenizer_sha256(self.tokenizer)} | space.hashes
        if self.base is not None:
            self._hashes["base"] = self.base.statement.base_sha256
        return GenerationStart(
            settings=settings,
            manifest=self.newest_manifest(),
            dataset_info=msgspec.json.encode(self.source.dataset_info),
            tokenizer=list(self.tokenizer),
            upload_bytes_per_second={}
            if self._plan is None
            else dict(zip(generation.names, self._plan.bytes_per_second, strict=True)),
            step_layout=make_step_layout(
                self.run_model.built, self.config, shares, chats=self.source.dataset_info.chats
            ),
        )

    def _base_seconds(self, generation: Generation, forecast: GenerationForecast) -> float:
        """For how much longer peers wait for each other, because some may download their parts of a base first."""
        if self.base is None:
            return 0.0
        hub_bps = forecast.hub_up_bps / len(generation.names)
        stages = zip(generation.partition.stages, forecast.down_bps, strict=True)
        return max(
            _BASE_PATIENCE * 8 * self.base.nbytes(segments) / min(hub_bps, down_bps)
            for (_, segments), down_bps in stages
        )

    def _plan_commits(self, shares: Sequence[int], forecast: GenerationForecast) -> CommitPlan:
        """Chooses commit interval and upload rates from the forecast."""
        config = self.config
        predicted = predict_step_seconds(
            tokens=config.training.global_batch_size * config.training.seq_len,
            tokens_per_second=forecast.tokens_per_second,
            microbatches=config.microbatches,
            peers=len(shares),
            latency_s=forecast.latency_s,
        )
        step_seconds = self._step_seconds.begin(predicted)
        return plan_commits(
            state_nbytes=self._peer_state_nbytes(shares),
            up_bps=forecast.up_bps,
            hub_down_bps=forecast.hub_down_bps,
            share=config.checkpoint.uplink_share,
            step_seconds=step_seconds,
            max_steps=config.training.steps,
            interval=config.checkpoint.interval,
        )

    def _peer_state_nbytes(self, shares: Sequence[int]) -> list[float]:
        """Bytes of checkpoint that each peer saves, in pipeline order; includes codec state of the newest
        checkpoint."""
        of_segments: list[float] = list(self.run_model.state_nbytes)
        for name, entry in self.newest.manifest.files.items():
            if (segment := segment_of_codec_state(layer_of(name))) is not None:
                of_segments[segment] += entry.nbytes
        ends = list(accumulate(shares))
        return [sum(of_segments[end - share : end]) for end, share in zip(ends, shares, strict=True)]

    def compare_hashes(self, hashes: Mapping[str, str]) -> str:
        ours = self._hashes
        for field in dict.fromkeys((*ours, *hashes)):
            here, there = ours.get(field, "none"), hashes.get(field, "none")
            if here != there:
                return f"{field[:80]} is {there[:80]} at the peer and {here} at the hub: both must be equal"
        return ""

    def find(self, name: str) -> Path | FileRange | None:
        if name.startswith("base/"):
            return None if self.base is None else self.base.find(name)
        return self.tokenizer.get(name) if name.startswith("tokenizer/") else super().find(name)

    def tokens(self, split: str, index: int) -> bytes:
        if index < 0:
            raise IndexError(index)
        ids_BW = self.source.batch(Cursor(samples_seen=index)) if split == "train" else self.source.validation[index]
        info = self.source.dataset_info
        return ids_BW.astype(token_dtype(info.vocab_size, chats=info.chats)).tobytes()

    # Whether commits come

    @property
    def commit_plan(self) -> str:
        return "" if self._plan is None else self._plan.in_words(self._step_seconds.first)

    @property
    def commit_summary(self) -> str:
        return self._watchdog.in_words(time.monotonic(), self.commit_plan, self.ledger.owed())

    def check_commits(self) -> list[HubEvent]:
        now, found = time.monotonic(), list[HubEvent]()
        self.ledger.abandon_overdue(now, self._upload_seconds, MAX_UPLOAD_SECONDS)
        abandoned = self.ledger.pop_abandoned()
        if abandoned is not None and abandoned[0] != self._abandoned_by:
            self._abandoned_by = abandoned[0]
            found.append(CheckpointAbandoned(step=self.committed, reason=abandoned[1]))
        interval = 0.0 if self._plan is None else self._plan.seconds(self._step_seconds.known)
        overdue = self._watchdog.check(now, interval, "; ".join([self.ledger.owed(), *self.refusals]))
        return [*found, *([] if overdue is None else [overdue])]

    def on_commit(self, checkpoint: Checkpoint, announced: float) -> None:
        self._watchdog.on_commit(checkpoint.manifest.step, announced)
        self.display.say(f"step: {checkpoint.manifest.step:>6}  saved: the hub has all of it in {checkpoint.path}")
        self._abandoned_by = frozenset()
        self._audit.on_commit(checkpoint)

    def on_event(self, event: AnyEvent) -> None:
        event = self._with_own_paths(event)
        if isinstance(event, Step):
            self._step = event
            self._audit.on_step(event)
            self._step_seconds.add(self._believed_seconds(event, time.monotonic()))
            self._watchdog.on_step(time.monotonic(), event.step)
        if isinstance(event, GenerationEnded):
            self._watchdog.end(time.monotonic())
        if not isinstance(event, Saved):  # by its peer: the hub says so once it has the files
            self.display.show(event)
        self._delayed_events.write(event)
        self._count(event)
        if (lost := self.exactness.on_event(event)) is not None:
            self._record(lost)

    def _believed_seconds(self, event: Step, now: float) -> float:
        """Duration of a step as its peer says, within what the hub's clock shows: no longer than since the last report,
        and no shorter than a tenth of the mean of the generation. Else one peer would decide how often all commit, and
        when commits are overdue."""
        longest, self._reported_at = now - self._reported_at, now
        shortest = _SHORTEST_SHARE * (now - self._begun) / max(1, event.step - self._begun_step)
        return max(shortest, min(event.seconds, longest))

    def _with_own_paths(self, event: AnyEvent) -> AnyEvent:
        """The event of a peer with the places of this machine, not with those of the peer's."""
        checkpoints = checkpoints_path(self.config.job.dump_folder)
        if isinstance(event, Saved):
            return msgspec.structs.replace(event, path=str(checkpoints / step_folder(event.step)))
        if isinstance(event, Started) and event.resumed_from:
            return msgspec.structs.replace(event, resumed_from=str(checkpoints / step_folder(event.step)))
        return event

    def _record(self, event: AnyEvent) -> None:
        """Shows and logs an event that the run host itself has noticed."""
        self._count(event)
        self._notices.append(format_event_line(event))
        self.display.show(event)
        self._delayed_events.write(event)

    def _count(self, event: AnyEvent) -> None:
        self.alarms += isinstance(event, AuditEvent) and event.is_disputed

    def stop(self, reason: str) -> None:
        self._stopped = reason
        self.on_event(Stopped(step=self.resume_step if self._step is None else self._step.step, reason=reason))

    def _report_log_problem(self, reason: str) -> None:
        self.display.show(SaveFailed(step=self.committed if self._step is None else self._step.step, reason=reason))

    @property
    def audit_summary(self) -> str:
        return self._audit.summary

    def close(self) -> None:
        self._audit.close()
        self._delayed_events.close()
        self.commit_log.close()

    @property
    def ended(self) -> str:
        """Why the run has ended. A run is finished when its last step is committed, whatever peers report."""
        if self._stopped:
            return f"stopped: {self._stopped}"
        return f"finished: the trained model is in {self.config.job.dump_folder}" if self.finished else ""

    @property
    def finished(self) -> bool:
        return not self._stopped and self.committed >= self.config.training.steps and not self.missing

    @property
    def progress(self) -> Mapping[str, float]:
        if self._step is None:
            return {}
        step = self._step
        return {
            "step": float(step.step),
            "steps": float(self.config.training.steps),
            "loss": step.loss,
            "tokens_per_second": step.tokens_per_second,
        }


def _tokenizer_files(folder: Path | None) -> dict[str, Path]:
    return {} if folder is None else {f"tokenizer/{path.name}": path for path in folder.iterdir() if path.is_file()}
