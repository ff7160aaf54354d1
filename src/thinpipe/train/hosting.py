"""A run as its hub hosts it: settings and data are here, checkpoints come together here, and nothing is computed."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest, model_config_of, restore
from thinpipe.checkpoint.folder import is_layer_file, layer_of, step_folder
from thinpipe.checkpoint.memories import segment_of_memory
from thinpipe.checkpoint.state import versions
from thinpipe.core.config import dump_toml
from thinpipe.core.digest import text_sha256
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, EventLog, SaveFailed, Step, Stopped
from thinpipe.core.files import write_atomically
from thinpipe.core.numerics import numerics
from thinpipe.data import Cursor
from thinpipe.models.model import make_space
from thinpipe.swarm.assign import Assignment, Machine, assign
from thinpipe.swarm.commit_log import COMMITS, CommitLog
from thinpipe.swarm.file_service import Accepted
from thinpipe.swarm.hosted import Beginning, Outlook
from thinpipe.swarm.messages import Give, Measure, Verdict
from thinpipe.swarm.reading import UNREADABLE
from thinpipe.swarm.roster import Epoch
from thinpipe.train.commit_interval import CommitPlan, StepSeconds, plan_commits, predict_step_seconds
from thinpipe.train.commit_record import COMMIT, open_ledger, say_replaced, state_of
from thinpipe.train.config import DataSection, JobSection, MetricsSection, RunConfig
from thinpipe.train.console import Display
from thinpipe.train.costs import boundary_traffic, segment_needs, segment_state_nbytes, shared_nbytes
from thinpipe.train.first_checkpoint import make_first_checkpoint
from thinpipe.train.lost_files import find_missing, say_missing, set_aside
from thinpipe.train.newest_manifest import NEWEST, find_newest, keep_manifest
from thinpipe.train.tokens import LocalTokens, token_dtype, tokenizer_sha256

_ONE_STAGE_SCHEDULES = ("GPipe", "1F1B")
_MOST_FILE_NBYTES = 1 << 50
_MOST_ANSWER_NBYTES = 8_000_000
"""What a message can hold."""


class HostedRun:
    """See `swarm.hosted.Hosted`. `display` shows what the first peer tells of the run."""

    def __init__(self, config: RunConfig, display: Display, *, everyone: bool = False) -> None:
        self.everyone = everyone
        _refuse_what_has_no_effect(config)
        self.config, self.display, self.numerics = config, display, numerics()
        self.source = LocalTokens(config)
        _refuse_large_batches(config, self.source.facts.vocab_size)
        self.checkpoints = CheckpointFolder(config.job.dump_folder / "checkpoints")
        kept = config.checkpoint.keep_latest_k
        self.commit_log = CommitLog(config.job.dump_folder / COMMITS, most=kept + 1 if kept else 0)
        self._kept = config.job.dump_folder / NEWEST
        newest, self._news = find_newest(self.checkpoints, self._kept, self.commit_log.history)
        self.newest = newest or make_first_checkpoint(config, self.source.facts, self.checkpoints)
        self._before: Checkpoint | None = None
        """The commit before: spares may be copying it still."""
        self.missing: dict[str, str] = find_missing(self.newest)
        self.model = model_config_of(self.newest)
        self.measure = Measure(together=False, settings=dump_toml(settings_for_peers(config)), dim=self.model.dim)
        self.needs = segment_needs(self.model, config)
        self.state_nbytes = segment_state_nbytes(self.model, config)
        self.shared_nbytes = shared_nbytes(self.model, config)
        self.traffic = boundary_traffic(self.model, config)
        self.log = EventLog(config.job.dump_folder / "events.jsonl")
        self.tokenizer = _tokenizer_files(self.source.tokenizer_folder)
        self.source.keep_tokenizer(config.job.dump_folder)
        self._step: Step | None = None
        self._stopped = ""
        self.ledger = open_ledger(self.commit_log, self.newest, self._news.append)
        with suppress(OSError):  # then the log alone says which was the newest
            keep_manifest(self._kept, self.newest.manifest)
        self._told: Manifest | None = None
        """Of the checkpoint whose files are on their way."""
        self._plan: CommitPlan | None = None
        self._step_seconds = StepSeconds()
        self.commits = ""

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def assign(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Assignment:
        return assign(
            self.needs,
            machines,
            self.traffic,
            hub_up_bps=hub_up_bps,
            hub_down_bps=hub_down_bps,
            shared_nbytes=self.shared_nbytes,
            most=self._most_peers,
            everyone=self.everyone,
        )

    @property
    def _most_peers(self) -> int | None:
        """1F1B needs a micro-batch for each."""
        return self.config.microbatches if self.config.parallelism.pipeline_parallel_schedule == "1F1B" else None

    def begin(self, epoch: Epoch, outlook: Outlook | None = None) -> Beginning:
        self.ledger.begin(epoch.number, epoch.names)
        shares = list(epoch.shares.values())
        self._plan = None if outlook is None else self._plan_commits(shares, outlook)
        interval = self.config.checkpoint.steps if self._plan is None else self._plan.interval
        settings = dump_toml(settings_for_peers(self.config, shares, interval))
        space = make_space(self.model)
        restore(self.newest, {}, space)
        self._hashes = {"settings": text_sha256(settings), "tokenizer": tokenizer_sha256(self.tokenizer)} | space.hashes
        return Beginning(
            settings=settings,
            manifest=self.newest_manifest(),
            facts=msgspec.json.encode(self.source.facts),
            tokenizer=list(self.tokenizer),
            keep_bytes_per_second={}
            if self._plan is None
            else dict(zip(epoch.names, self._plan.bytes_per_second, strict=True)),
        )

    def newest_manifest(self) -> bytes:
        return msgspec.json.encode(self.newest.manifest)

    def _plan_commits(self, shares: Sequence[int], outlook: Outlook) -> CommitPlan:
        config = self.config
        predicted = predict_step_seconds(
            tokens=config.training.global_batch_size * config.training.seq_len,
            tokens_per_second=outlook.tokens_per_second,
            microbatches=config.microbatches,
            peers=len(shares),
            latency_s=outlook.latency_s,
        )
        step_seconds = self._step_seconds.begin(predicted)
        plan = plan_commits(
            state_nbytes=self._state_of_peers(shares),
            up_bps=outlook.up_bps,
            hub_down_bps=outlook.hub_down_bps,
            share=config.checkpoint.line_share,
            step_seconds=step_seconds,
            most_steps=config.training.steps,
            interval=config.checkpoint.interval,
        )
        self.commits = plan.in_words(step_seconds)
        return plan

    def _state_of_peers(self, shares: Sequence[int]) -> list[float]:
        of_segments: list[float] = list(self.state_nbytes)
        for name, entry in self.newest.manifest.files.items():
            if (segment := segment_of_memory(layer_of(name))) is not None:
                of_segments[segment] += entry.nbytes
        ends = list(accumulate(shares))
        return [sum(of_segments[end - share : end]) for end, share in zip(ends, shares, strict=True)]

    # Files of the newest checkpoint that were lost here

    @property
    def committed(self) -> int:
        return self.newest.manifest.step

    async def look(self) -> None:
        newest = self.newest
        missing = await asyncio.to_thread(find_missing, newest)
        if self.newest is newest:  # else a newer one came meanwhile, whole
            self.missing = missing

    def give(self) -> Give:
        self.ledger.give_up()
        text = f"the hub has lost {len(self.missing)} file(s) of step {self.committed}: giving it those that are here"
        return Give(step=self.committed, files=dict(self.missing), manifest=self.newest.manifest.sha256, text=text)

    def what_is_missing(self, present: Collection[str], away: Collection[str]) -> str:
        return say_missing(self.committed, self.ledger.peers_with(self.missing), present, away)

    def fall_back(self, present: Collection[str], away: Collection[str]) -> str:
        lost, why = self.newest, self.what_is_missing(present, away)
        try:
            older, _ = self.checkpoints.newest_whole(layers=(), below=lost.manifest.step)
            if older is None and away:
                return f"{why}, and there is no older checkpoint: waiting for those who are away"
            if older is None:
                raise UserError("there is no older checkpoint")
            keep_manifest(self._kept, older.manifest)
            place = set_aside(lost)
        except (UserError, OSError) as error:
            self._stopped = f"{why}, and {error}"
            return f"cannot go on: {self._stopped}"
        self.newest, self._before, self.missing = older, None, {}
        self.ledger.fall_back(self.committed)
        return f"{why}: going on from step {self.committed}; what is left of step {lost.manifest.step} is in {place}"

    def compare(self, hashes: Mapping[str, str]) -> str:
        ours = self._hashes
        for field in dict.fromkeys((*ours, *hashes)):
            here, there = ours.get(field, "none"), hashes.get(field, "none")
            if here != there:
                return f"{field[:80]} is {there[:80]} there and {here} at the hub: it must be the same"
        return ""

    def find(self, name: str) -> Path | None:
        folder, _, file = name.partition("/")
        if folder == "tokenizer":
            return self.tokenizer.get(name)
        for commit in (self.newest, self._before):
            if commit is not None and folder == commit.path.name and file in commit.manifest.files:
                return commit.path / file
        return None

    def tokens(self, split: str, index: int) -> bytes:
        if index < 0:
            raise IndexError(index)
        ids_BW = self.source.batch(Cursor(samples_seen=index)) if split == "train" else self.source.validation[index]
        return ids_BW.astype(token_dtype(self.source.facts.vocab_size)).tobytes()

    # Checkpoints: every peer of an epoch tells the same manifest, and sends its files; then it is a commit

    def saved(self, peer: str, epoch: int, manifest: bytes, files: Collection[str]) -> Verdict:
        try:
            told = self._read_manifest(manifest)
            answer = self.ledger.told(peer, epoch, state_of(told), files, told.sha256, time.monotonic())
            if answer == "later":
                return Verdict(later=True)
            if answer == "begin":
                self._told = told
                self.checkpoints.begin(told.step)
            self._commit_if_whole()
        except UserError as error:
            return Verdict(refusal=str(error))
        except OSError as error:
            self.ledger.give_up()
            return Verdict(refusal=f"the hub cannot write ({error.strerror or type(error).__name__})")
        return Verdict()

    def _read_manifest(self, data: bytes) -> Manifest:
        """With our settings in it. Raises UserError if it cannot be of this run."""
        try:
            told = msgspec.json.decode(data, type=Manifest)
        except UNREADABLE as error:
            raise UserError(f"the manifest cannot be read: {error}") from None
        sizes_are_right = all(0 <= entry.nbytes <= _MOST_FILE_NBYTES for entry in told.files.values())
        names_are_right = bool(told.files) and all(map(is_layer_file, told.files))
        if told != told.sealed() or not names_are_right or not sizes_are_right:
            raise UserError("the manifest is damaged")
        ours = msgspec.json.decode(msgspec.json.encode(self.newest.manifest.model))  # without tuples, as what comes
        family, version = self.newest.manifest.family, self.newest.manifest.format_version
        if (told.model, told.family, told.format_version) != (ours, family, version):
            raise UserError("the manifest is of another model")
        if not 0 < told.step <= self.config.training.steps:
            raise UserError(f"there is no step {told.step} in this run")
        return _with_our_settings(told, dump_toml(self.config))

    def gone(self, peer: str) -> None:
        self.ledger.gone(peer)

    def accept(self, peer: str, name: str) -> Accepted | None:
        """Also what is committed already: a peer that was slower than others is told that it is there."""
        folder, _, file = name.partition("/")
        manifest, place = self.newest.manifest, self.newest.path
        if folder != place.name:
            manifest, arriving = self._told or manifest, self.ledger.arriving
            if arriving is None or folder != step_folder(arriving):
                return None
            if not self.ledger.expects(peer, arriving, file, time.monotonic()):
                return None
            place = self.checkpoints.partial(arriving)
        entry = manifest.files.get(file)
        return None if entry is None else Accepted(target=place / file, nbytes=entry.nbytes, sha256=entry.sha256)

    def kept(self, peer: str, name: str) -> None:
        folder, _, file = name.partition("/")
        arriving = self.ledger.arriving
        if folder == step_folder(self.committed):
            self.missing.pop(file, None)
        elif arriving is not None and folder == step_folder(arriving):
            self.ledger.came(peer, arriving, file)
            try:
                self._commit_if_whole()
            except OSError as error:
                self.not_kept(peer, name, error.strerror or type(error).__name__)

    def not_kept(self, peer: str, name: str, why: str) -> None:
        """This checkpoint will not be whole, so the next one need not wait for it."""
        folder, step, arriving = name.partition("/")[0], self.committed, self.ledger.arriving
        if arriving is not None and folder == step_folder(arriving):
            step = arriving
            self.ledger.give_up()
        elif folder != step_folder(step):
            return  # of one that is given up already
        self.heard(SaveFailed(step=step, reason=f"the hub cannot write {name} of {peer}: {why}"))

    def _commit_if_whole(self) -> None:
        """First the checkpoint is durable, then its line in the log; only then is it the newest, which peers get."""
        commit = self.ledger.whole
        if commit is None:
            return
        assert self._told is not None
        write_atomically(self.checkpoints.partial(commit.step) / COMMIT, msgspec.json.encode(commit))
        checkpoint = self.checkpoints.commit(self._told, self._told.files)
        keep_manifest(self._kept, checkpoint.manifest)
        if not self.ledger.is_known(commit):
            self.commit_log.append(commit)
            if commit.replaces:
                self._news.append(say_replaced(commit))
        self.ledger.committed(commit)
        self.newest, self._before, self.missing = checkpoint, self.newest, {}
        with suppress(OSError):  # what could not be removed now will be next time
            self.checkpoints.keep_latest(self.config.checkpoint.keep_latest_k)

    def heard(self, event: AnyEvent) -> None:
        if isinstance(event, Step):
            self._step = event
            measured = self._step_seconds.add(event.seconds)
            if measured is not None and self._plan is not None:
                self.commits = self._plan.in_words(measured)
        if isinstance(event, Stopped) and event.reason == "not_finite":  # what else ends an epoch does not end the run
            self._stopped = event.reason
        self.display.show(event)
        try:
            self.log.write(event)
        except OSError as error:  # a full disk is no reason to stop the run
            self.display.show(SaveFailed(step=event.step, reason=f"event log: {error}"))

    def close(self) -> None:
        self.log.close()
        self.commit_log.close()

    @property
    def ended(self) -> str:
        """Finished is a run when its last step is committed, whatever peers say."""
        if self._stopped:
            return f"stopped: {self._stopped}"
        finished = self.committed >= self.config.training.steps and not self.missing
        return f"finished: the hub has the model in {self.config.job.dump_folder}" if finished else ""

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


def settings_for_peers(config: RunConfig, shares: Sequence[int] = (1,), interval: int | None = None) -> RunConfig:
    """Without what is the hub's own: its folders, its page, its sinks. `interval`: of commits."""
    parallelism = replace(
        config.parallelism, pipeline_parallel_degree=len(shares), pipeline_parallel_shares=tuple(shares)
    )
    checkpoint = replace(config.checkpoint, interval=interval or config.checkpoint.interval)
    return replace(
        config,
        job=JobSection(),
        data=DataSection(),
        parallelism=parallelism,
        checkpoint=checkpoint,
        metrics=MetricsSection(log_freq=config.metrics.log_freq),
    )


def _with_our_settings(manifest: Manifest, run: str) -> Manifest:
    """Folders, devices and versions differ between peers; whoever uses the checkpoint here needs those of the hub."""
    return msgspec.structs.replace(manifest, run=run, versions=versions()).sealed()


def _tokenizer_files(folder: Path | None) -> dict[str, Path]:
    return {} if folder is None else {f"tokenizer/{path.name}": path for path in folder.iterdir() if path.is_file()}


def _refuse_large_batches(config: RunConfig, vocab_size: int) -> None:
    training = config.training
    nbytes = training.global_batch_size * (training.seq_len + 1) * token_dtype(vocab_size).itemsize
    if nbytes > _MOST_ANSWER_NBYTES:
        raise UserError(
            f"the ids of a batch take {nbytes} bytes, and a hub can send {_MOST_ANSWER_NBYTES} at once: lower "
            "training.global_batch_size or training.seq_len"
        )


def _refuse_what_has_no_effect(config: RunConfig) -> None:
    schedule = config.parallelism.pipeline_parallel_schedule
    if schedule not in _ONE_STAGE_SCHEDULES:
        raise UserError(
            f"a hub gives every peer segments that follow each other, and {schedule} wants them from two places: "
            f"set parallelism.pipeline_parallel_schedule to {' or '.join(_ONE_STAGE_SCHEDULES)}"
        )
    if config.link.is_shaped:
        raise UserError("peers have real lines: leave [link] out, it would have no effect")
    if config.boundary.store is not None:
        raise UserError("boundary.store is a folder of one machine: leave it out")
