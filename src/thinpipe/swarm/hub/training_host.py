"""The training run hosted by a hub: settings, data, partitioning and commits of checkpoints. Computes no training
steps."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest, model_config_of, restore
from thinpipe.checkpoint.codec_state import segment_of_codec_state
from thinpipe.checkpoint.state import versions
from thinpipe.checkpoint.storage import is_layer_file, layer_of
from thinpipe.config.parameter_shapes import attention_heads
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import AnyEvent, RolledBack, SaveFailed, Step, Stopped
from thinpipe.core.exactness import exactness_of
from thinpipe.core.files import write_atomically
from thinpipe.core.hashing import text_sha256
from thinpipe.core.numerics import numerics
from thinpipe.core.run_folder import checkpoints_path, events_path, step_folder
from thinpipe.data import Cursor
from thinpipe.models.model import make_space
from thinpipe.planning.messages import message_sizes
from thinpipe.planning.partition import Machine, Partition, make_partition
from thinpipe.planning.segment_costs import needs_by_kernel, segment_costs, shared_nbytes
from thinpipe.swarm.hub.commits.interval import CommitPlan, StepTimeEstimator, plan_commits, predict_step_seconds
from thinpipe.swarm.hub.commits.log import COMMIT_LOG_FILE, CommitLog
from thinpipe.swarm.hub.commits.lost_files import describe_missing_files, find_missing, set_aside
from thinpipe.swarm.hub.commits.recovery import (
    COMMIT_FILE,
    NEWEST_MANIFEST_FILE,
    describe_replacement,
    find_newest,
    open_ledger,
    save_newest_manifest,
    state_of,
)
from thinpipe.swarm.hub.delayed_events import DelayedEvents
from thinpipe.swarm.hub.first_checkpoint import make_first_checkpoint
from thinpipe.swarm.hub.membership import Generation
from thinpipe.swarm.hub.run_host import GenerationForecast, GenerationStart
from thinpipe.swarm.hub.run_settings import refuse_large_batches, reject_unused_settings, settings_for_peers
from thinpipe.swarm.hub.services.files import ExpectedFile
from thinpipe.swarm.protocol.messages import AnnouncementReply, Measure, RestoreFiles
from thinpipe.training.console import Display
from thinpipe.training.data_loading import LocalTokens, token_dtype, tokenizer_sha256

_LOG = logging.getLogger(__name__)
_MAX_FILE_NBYTES = 1 << 50


class TrainingHost:
    """Implements `hub.run_host.RunHost`. `display` shows the events reported by the first peer."""

    def __init__(self, config: RunConfig, display: Display, *, use_all_peers: bool = False) -> None:
        self.use_all_peers = use_all_peers
        reject_unused_settings(config)
        self.config, self.display, self.numerics = config, display, numerics()
        self.source = LocalTokens(config)
        refuse_large_batches(config, self.source.dataset_info.vocab_size)
        self.checkpoints = CheckpointFolder(checkpoints_path(config.job.dump_folder))
        kept = config.checkpoint.keep_latest_k
        self.commit_log = CommitLog(config.job.dump_folder / COMMIT_LOG_FILE, max_records=kept + 1 if kept else 0)
        self._newest_manifest_path = config.job.dump_folder / NEWEST_MANIFEST_FILE
        newest, self._notices = find_newest(self.checkpoints, self._newest_manifest_path, self.commit_log.history)
        self.newest = newest or make_first_checkpoint(config, self.source.dataset_info, self.checkpoints)
        self._previous: Checkpoint | None = None
        """The commit before `newest`, which standbys may still be mirroring."""
        self.missing: dict[str, str] = find_missing(self.newest)
        self.model = model_config_of(self.newest)
        self.measure = Measure(
            concurrent=False,
            settings=dump_toml(settings_for_peers(config)),
            dim=self.model.dim,
            heads=attention_heads(self.model),
        )
        self.needs = needs_by_kernel(self.model, config)
        self.state_nbytes = [cost.state_nbytes for cost in segment_costs(self.model, config)]
        self.shared_nbytes = shared_nbytes(self.model, config)
        self.traffic = message_sizes(self.model, config).traffic(config)
        self.exactness = exactness_of(events_path(config.job.dump_folder))
        self._delayed_events = DelayedEvents(events_path(config.job.dump_folder), self._report_log_problem)
        self.tokenizer = _tokenizer_files(self.source.tokenizer_folder)
        self.source.save_tokenizer(config.job.dump_folder)
        self._step: Step | None = None
        self._stopped = ""
        self.ledger = open_ledger(self.commit_log, self.newest, self._notices.append)
        try:
            save_newest_manifest(self._newest_manifest_path, self.newest.manifest)
        except OSError:  # then only the commit log says which checkpoint is the newest
            _LOG.warning("%s cannot be written", self._newest_manifest_path, exc_info=True)
        self._announced_manifest: Manifest | None = None
        """Manifest of the checkpoint that peers are uploading."""
        self._plan: CommitPlan | None = None
        self._step_seconds = StepTimeEstimator()
        self.commit_summary = ""

    def pop_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def make_partition(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Partition:
        return make_partition(
            self.needs,
            machines,
            self.traffic,
            hub_up_bps=hub_up_bps,
            hub_down_bps=hub_down_bps,
            shared_nbytes=self.shared_nbytes,
            max_machines=self._max_peers,
            use_all_peers=self.use_all_peers,
        )

    @property
    def _max_peers(self) -> int | None:
        """Maximum number of peers in a generation: 1F1B needs at least one micro-batch per stage."""
        return self.config.microbatches if self.config.parallelism.pipeline_parallel_schedule == "1F1B" else None

    def begin(self, generation: Generation, forecast: GenerationForecast | None = None) -> GenerationStart:
        self.ledger.begin(generation.number, generation.names)
        shares = list(generation.shares.values())
        self._plan = None if forecast is None else self._plan_commits(shares, forecast)
        interval = self.config.checkpoint.steps if self._plan is None else self._plan.interval
        settings = dump_toml(settings_for_peers(self.config, shares, interval))
        space = make_space(self.model)
        restore(self.newest, {}, space)
        self._hashes = {"settings": text_sha256(settings), "tokenizer": tokenizer_sha256(self.tokenizer)} | space.hashes
        return GenerationStart(
            settings=settings,
            manifest=self.newest_manifest(),
            dataset_info=msgspec.json.encode(self.source.dataset_info),
            tokenizer=list(self.tokenizer),
            upload_bytes_per_second={}
            if self._plan is None
            else dict(zip(generation.names, self._plan.bytes_per_second, strict=True)),
        )

    def newest_manifest(self) -> bytes:
        return msgspec.json.encode(self.newest.manifest)

    def _plan_commits(self, shares: Sequence[int], forecast: GenerationForecast) -> CommitPlan:
        """Chooses commit interval and upload rates from the forecast, and updates `commit_summary`."""
        config = self.config
        predicted = predict_step_seconds(
            tokens=config.training.global_batch_size * config.training.seq_len,
            tokens_per_second=forecast.tokens_per_second,
            microbatches=config.microbatches,
            peers=len(shares),
            latency_s=forecast.latency_s,
        )
        step_seconds = self._step_seconds.begin(predicted)
        plan = plan_commits(
            state_nbytes=self._peer_state_nbytes(shares),
            up_bps=forecast.up_bps,
            hub_down_bps=forecast.hub_down_bps,
            share=config.checkpoint.uplink_share,
            step_seconds=step_seconds,
            max_steps=config.training.steps,
            interval=config.checkpoint.interval,
        )
        self.commit_summary = plan.in_words(step_seconds)
        return plan

    def _peer_state_nbytes(self, shares: Sequence[int]) -> list[float]:
        """Bytes of checkpoint that each peer saves, in pipeline order; includes codec state of the newest
        checkpoint."""
        of_segments: list[float] = list(self.state_nbytes)
        for name, entry in self.newest.manifest.files.items():
            if (segment := segment_of_codec_state(layer_of(name))) is not None:
                of_segments[segment] += entry.nbytes
        ends = list(accumulate(shares))
        return [sum(of_segments[end - share : end]) for end, share in zip(ends, shares, strict=True)]

    # Files of the newest checkpoint that were lost at the hub

    @property
    def committed(self) -> int:
        return self.newest.manifest.step

    @property
    def resume_step(self) -> int:
        return self.ledger.pending_step or self.committed

    async def verify_newest(self) -> None:
        newest = self.newest
        missing = await asyncio.to_thread(find_missing, newest)
        if self.newest is newest:  # else a newer, complete commit was made meanwhile
            self.missing = missing

    def restore_request(self) -> RestoreFiles:
        self.ledger.abandon_pending()
        step, manifest = self.committed, self.newest.manifest.sha256
        text = f"the hub has lost {len(self.missing)} file(s) of step {step}: uploading the copies stored here"
        return RestoreFiles(step=step, files=dict(self.missing), manifest=manifest, text=text)

    def describe_missing(self, present: Collection[str], absent: Collection[str]) -> str:
        return describe_missing_files(self.committed, self.ledger.holders_of(self.missing), present, absent)

    def roll_back(self, present: Collection[str], absent: Collection[str]) -> RolledBack | str:
        lost, why = self.newest, self.describe_missing(present, absent)
        try:
            older, _ = self.checkpoints.newest_complete(layers=(), below=lost.manifest.step)
            if older is None and absent:
                return f"{why}, and there is no older checkpoint: waiting for {', '.join(sorted(absent))} to connect"
            if older is None:
                raise UserError("there is no older checkpoint")
            save_newest_manifest(self._newest_manifest_path, older.manifest)
            folder = set_aside(lost)
        except (UserError, OSError) as error:
            self._stopped = f"{why}, and {error}"
            return f"the run cannot continue: {self._stopped}"
        self.newest, self._previous, self.missing = older, None, {}
        self.ledger.roll_back(self.committed)
        return RolledBack(step=self.committed, lost_step=lost.manifest.step, reason=why, folder=str(folder))

    def compare_hashes(self, hashes: Mapping[str, str]) -> str:
        ours = self._hashes
        for field in dict.fromkeys((*ours, *hashes)):
            here, there = ours.get(field, "none"), hashes.get(field, "none")
            if here != there:
                return f"{field[:80]} is {there[:80]} at the peer and {here} at the hub: both must be equal"
        return ""

    def find(self, name: str) -> Path | None:
        folder, _, file = name.partition("/")
        if folder == "tokenizer":
            return self.tokenizer.get(name)
        for commit in (self.newest, self._previous):
            if commit is not None and folder == commit.path.name and file in commit.manifest.files:
                return commit.path / file
        return None

    def tokens(self, split: str, index: int) -> bytes:
        if index < 0:
            raise IndexError(index)
        ids_BW = self.source.batch(Cursor(samples_seen=index)) if split == "train" else self.source.validation[index]
        return ids_BW.astype(token_dtype(self.source.dataset_info.vocab_size)).tobytes()

    # Commits: every peer of a generation announces the same manifest and uploads its files

    def on_checkpoint_announced(
        self, peer: str, generation: int, manifest: bytes, files: Collection[str]
    ) -> AnnouncementReply:
        try:
            announced = self._read_manifest(manifest)
            answer = self.ledger.announce(
                peer, generation, state_of(announced), files, announced.sha256, time.monotonic()
            )
            if answer == "retry":
                return AnnouncementReply(retry_later=True)
            if answer == "begin":
                self._announced_manifest = announced
                self.checkpoints.begin(announced.step)
            self._commit_if_whole()
        except UserError as error:
            return AnnouncementReply(refusal=str(error))
        except OSError as error:
            self.ledger.abandon_pending()
            return AnnouncementReply(refusal=f"the hub cannot write ({error.strerror or type(error).__name__})")
        return AnnouncementReply()

    def _read_manifest(self, data: bytes) -> Manifest:
        """Decodes an announced manifest and replaces its settings by the hub's. Raises UserError if it cannot belong to
        this run."""
        try:
            announced = msgspec.json.decode(data, type=Manifest)
        except DECODE_ERRORS as error:
            raise UserError(f"the manifest cannot be decoded: {error}") from None
        sizes_are_right = all(0 <= entry.nbytes <= _MAX_FILE_NBYTES for entry in announced.files.values())
        names_are_right = bool(announced.files) and all(map(is_layer_file, announced.files))
        if announced != announced.with_checksum() or not names_are_right or not sizes_are_right:
            raise UserError("the manifest has a wrong checksum, or names or sizes that no checkpoint has")
        ours = msgspec.json.decode(msgspec.json.encode(self.newest.manifest.model))  # tuples become lists, as in JSON
        family, version = self.newest.manifest.family, self.newest.manifest.format_version
        if (announced.model, announced.family, announced.format_version) != (ours, family, version):
            raise UserError("the manifest describes another model")
        if not 0 < announced.step <= self.config.training.steps:
            raise UserError(f"there is no step {announced.step} in this run")
        of_hub = {"run": dump_toml(self.config), "versions": versions()}  # these differ between peers
        return msgspec.structs.replace(announced, **of_hub).with_checksum()

    def drop_peer(self, peer: str) -> None:
        self.ledger.drop_peer(peer)

    def accept(self, peer: str, name: str) -> ExpectedFile | None:
        """The file, if this peer may upload it now. Also for files already committed: a slower peer then learns that
        they are complete."""
        folder, _, file = name.partition("/")
        manifest, place = self.newest.manifest, self.newest.path
        if folder != place.name:
            manifest, pending_step = self._announced_manifest or manifest, self.ledger.pending_step
            if pending_step is None or folder != step_folder(pending_step):
                return None
            if not self.ledger.expects(peer, pending_step, file, time.monotonic()):
                return None
            place = self.checkpoints.partial(pending_step)
        entry = manifest.files.get(file)
        return None if entry is None else ExpectedFile(target=place / file, nbytes=entry.nbytes, sha256=entry.sha256)

    def on_file_saved(self, peer: str, name: str) -> None:
        folder, _, file = name.partition("/")
        pending_step = self.ledger.pending_step
        if folder == step_folder(self.committed):
            self.missing.pop(file, None)
        elif pending_step is not None and folder == step_folder(pending_step):
            self.ledger.on_file_received(peer, pending_step, file)
            try:
                self._commit_if_whole()
            except OSError as error:
                self.on_save_failed(peer, name, error.strerror or type(error).__name__)

    def on_save_failed(self, peer: str, name: str, why: str) -> None:
        """Gives up the pending checkpoint, which cannot become complete, so that the next one need not wait for it."""
        folder, step, pending_step = name.partition("/")[0], self.committed, self.ledger.pending_step
        if pending_step is not None and folder == step_folder(pending_step):
            step = pending_step
            self.ledger.abandon_pending()
        elif folder != step_folder(step):
            return  # the checkpoint was already given up
        self.on_event(SaveFailed(step=step, reason=f"the hub cannot write {name} of {peer}: {why}"))

    def _commit_if_whole(self) -> None:
        """Commits the pending checkpoint if it is complete. Order for crash safety: first the checkpoint is durable,
        then its record in the commit log; only then does it become `newest`, which peers get."""
        commit = self.ledger.complete
        if commit is None:
            return
        assert self._announced_manifest is not None
        write_atomically(self.checkpoints.partial(commit.step) / COMMIT_FILE, msgspec.json.encode(commit))
        checkpoint = self.checkpoints.commit(self._announced_manifest, self._announced_manifest.files)
        save_newest_manifest(self._newest_manifest_path, checkpoint.manifest)
        if not self.ledger.is_recorded(commit):
            self.commit_log.append(commit)
            if commit.replaces:
                self._notices.append(describe_replacement(commit))
        self.ledger.mark_committed(commit)
        self.newest, self._previous, self.missing = checkpoint, self.newest, {}
        try:
            self.checkpoints.keep_latest(self.config.checkpoint.keep_latest_k)
        except OSError:
            _LOG.warning("old checkpoints cannot be removed; trying again after the next commit", exc_info=True)

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, Step):
            self._step = event
            measured = self._step_seconds.add(event.seconds)
            if measured is not None and self._plan is not None:
                self.commit_summary = self._plan.in_words(measured)
        if isinstance(event, Stopped) and event.reason == "not_finite":  # other reasons end a generation, not the run
            self._stopped = event.reason
        self.display.show(event)
        self._delayed_events.write(event)
        if (lost := self.exactness.on_event(event)) is not None:
            self._notices.append(format_event_line(lost))
            self._delayed_events.write(lost)

    def _report_log_problem(self, reason: str) -> None:
        self.display.show(SaveFailed(step=self.committed if self._step is None else self._step.step, reason=reason))

    def close(self) -> None:
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
