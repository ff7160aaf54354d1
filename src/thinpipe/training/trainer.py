"""Training loop: batches, optimizer steps, validation, basis updates, checkpoints and events.

The loop is the same for a single process and for a pipeline: `Engine` computes the steps and knows the placement of
the segments, `RunEnvironment` holds what differs for a run joined through a hub.
"""

import logging
import math
import time
from contextlib import nullcontext

import torch.distributed as dist

from thinpipe.checkpoint import CheckpointFolder, find_checkpoint, new_manifest
from thinpipe.checkpoint.distributed import Saver, latest_common_checkpoint
from thinpipe.checkpoint.state import refuse_other_base, refuse_other_model, versions
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    EventLog,
    Merged,
    Retried,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
)
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import sanitize
from thinpipe.core.run_folder import checkpoints_path, events_path, settings_path
from thinpipe.data import Cursor
from thinpipe.device.device_class import device_class
from thinpipe.models.protocol import trainable_parameters
from thinpipe.optim.lr_schedule import lr_factor
from thinpipe.rounds.leases import batches, count
from thinpipe.training.attempts import MAX_CONSECUTIVE_SKIPS, Attempts
from thinpipe.training.base_hash import gather_base_sha256
from thinpipe.training.boundary_watch import BoundaryWatch
from thinpipe.training.console import Display, open_display
from thinpipe.training.data_loading import BatchLoader
from thinpipe.training.engine import Engine
from thinpipe.training.faults import Fault, PoisonedError
from thinpipe.training.graceful_shutdown import StopRequest
from thinpipe.training.local_rounds import LocalRounds
from thinpipe.training.model_choice import choose_model
from thinpipe.training.replica_sync import OneReplica, ReplicaSync
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.same_settings import changes_since, refuse_other_settings
from thinpipe.training.step_outcome import StepOutcome
from thinpipe.training.validation import validate

_LOG = logging.getLogger(__name__)


class Trainer:
    """One process of a training run. `train` resumes from the newest usable checkpoint in the run folder, if any."""

    def __init__(
        self, config: RunConfig, group: dist.ProcessGroup | None = None, run_environment: RunEnvironment | None = None
    ) -> None:
        self.config, self.run_environment = config, run_environment or RunEnvironment()
        self.collectives = self.run_environment.collectives(group)
        refuse_other_settings(config, self.collectives, has_own_places=self.run_environment.has_own_places)
        self.batch_loader = BatchLoader(config, self.collectives, self.run_environment.tokens)
        self.checkpoints = CheckpointFolder(checkpoints_path(config.job.dump_folder))
        origin = self.checkpoints.newest_complete(layers=())[0]
        if origin is None and config.model.initial is not None:
            origin = find_checkpoint(config.model.initial, layers=())
        self.model_config = choose_model(
            config,
            self.batch_loader.dataset_info.vocab_size,
            origin,
            reads_tokens=self.collectives.rank == 0 and self.run_environment.tokens is None,
        )
        self.engine = Engine(
            config, self.model_config, group, self.collectives, chats=self.batch_loader.dataset_info.chats
        )
        self.base_sha256 = gather_base_sha256(self.engine)
        self.boundary_watch = BoundaryWatch(
            self.engine.process_of_segment, self.run_environment.name_of, basis_interval=config.basis.interval
        )
        self.sync: ReplicaSync = OneReplica(config)
        if config.rounds.steps:
            self.sync = LocalRounds(config, self.model_config)
        self.finished_steps, self.merged_steps, self.cursor, self.saved_step = 0, 0, Cursor(), -1
        """`finished_steps`: place in the run, at which the next batch is. `merged_steps`: steps of which all replicas
        have the result."""
        self._origin = 0, 0
        """Step and sample at which this process began."""
        self._attempts = Attempts()
        self.stop = StopRequest(self._on_stop_request, self._lost_text)
        """SIGTERM or SIGINT to this process during `train`."""

    _log: EventLog | None
    _display: Display

    def _on_stop_request(self) -> None:
        if not self.run_environment.quiet:
            self._display.say(self.run_environment.stopping_text)

    def _lost_text(self) -> str:
        quiet, saved = self.run_environment.quiet, max(0, self.saved_step)
        return "" if quiet else self.run_environment.lost_text(self.finished_steps, saved)

    def train(self) -> str:
        """Trains until the last step, a stop request or too many skipped steps, then saves a checkpoint.

        Returns "finished", "signal", "not_finite" (no final checkpoint is saved) or "not_saved". Handles signals only
        in the main thread.
        """
        config = self.config
        self.saver = Saver(
            self.checkpoints,
            self.collectives,
            keep_latest=config.checkpoint.keep_latest_k,
            protected=self.run_environment.protected,
        )
        is_leader, around = self.collectives.rank == 0, self.run_environment
        with (
            EventLog(events_path(config.job.dump_folder)) if is_leader else nullcontext() as self._log,
            open_display(config, is_leader=is_leader, quiet=around.quiet, console=around.console) as self._display,
            self.stop,
        ):
            self._resume_or_start()
            self._display.working("compiling, then computing" if config.execution.compile else "computing")
            reason = self._train_until_stopped()
            if reason == "signal" and self.merged_steps != self.finished_steps:
                self.sync.rewind(self.engine)
                self._go_to(self.merged_steps)
            if reason != "not_finite" and not self._save():
                reason = "not_saved"
            text = around.stop_text(own=self.stop.requested) if reason == "signal" else ""
            self._tell(Stopped(step=self.finished_steps, reason=reason), text)
        return reason

    def _train_until_stopped(self) -> str:
        while lease := self.sync.lease(self.engine, self.merged_steps):
            done = 0
            for batch in batches(lease):
                self._go_to(batch)
                if self.run_environment.stops_now():
                    return "signal"
                with self.run_environment.step():
                    event, asked_to_stop = self._step()
                self._tell(event)
                done += 1
                if self._attempts.skips == MAX_CONSECUTIVE_SKIPS:
                    return "not_finite"
                if not self.sync.has_rounds:
                    self._after_steps(self.finished_steps)
                if asked_to_stop:
                    if done == count(lease):
                        self._merge(done)
                    return "signal"
            self._merge(done)
        return "finished"

    def _go_to(self, batch: int) -> None:
        step, samples = self._origin
        self.finished_steps = batch
        self.cursor = Cursor(samples_seen=samples + (batch - step) * self.config.training.global_batch_size)

    def _merge(self, done: int) -> None:
        """The lease is done: tells of the merge, if there was one, after which all replicas have the same weights."""
        began = time.monotonic()
        merge = self.sync.merge(self.engine, done)
        if merge is None:
            return
        nbytes, squares = self.collectives.all_reduce_sum([float(merge.nbytes), merge.squares])
        self._tell(
            Merged(
                step=merge.finished,
                round=merge.round_number,
                steps=merge.steps,
                update_norm=math.sqrt(squares),
                nbytes=round(nbytes),
                seconds=time.monotonic() - began,
            )
        )
        self._go_to(merge.finished)
        self._after_steps(merge.finished)

    def _step(self) -> tuple[AnyEvent, bool]:
        """Computes one step; returns its event and whether any process was asked to stop.

        The data cursor and the step count advance even if the step is skipped: a batch that always fails cannot cause
        an endless loop.
        """
        started = time.monotonic()
        lr = self.config.optimizer.lr * lr_factor(
            self.finished_steps, self.config.training.steps, self.config.lr_scheduler
        )
        outcome = self._compute(lr)
        self._go_to(self.finished_steps + 1)
        if outcome.fault is not None:
            return self._skipped(outcome, outcome.fault), outcome.stop
        for alarm in self.boundary_watch.observe(self.finished_steps, outcome.boundary_figures):
            self._tell(alarm)
        seconds = time.monotonic() - started
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        step = Step(
            step=self.finished_steps,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr,
            tokens=self.finished_steps * tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            links=outcome.links,
            busy=outcome.busy,
            memory=outcome.memory,
        )
        return step, outcome.stop

    def _compute(self, lr: float) -> StepOutcome:
        """Computes a step, again after a fault, as `Attempts` judges. Raises PoisonedError if a process is accused;
        returns a faulty outcome if the step is skipped."""
        ids_BW, number = self.batch_loader.batch(self.cursor), self.finished_steps + 1
        while True:
            outcome = self.engine.step(self.finished_steps, ids_BW, lr, asked_to_stop=self._asked_to_stop)
            fault = outcome.fault
            verdict = self._attempts.judge(fault, may_accuse=self.run_environment.may_accuse(number))
            if fault is None or verdict == "skip":
                return outcome
            if verdict == "accuse":
                raise PoisonedError(number, fault)
            self._tell(
                Retried(
                    step=number,
                    culprit=fault.culprit,
                    sender=self.run_environment.name_of(fault.sender),
                    boundary=fault.boundary,
                    forward=fault.forward,
                    reason=fault.reason,
                )
            )

    def _asked_to_stop(self) -> bool:
        """True if a signal or the hub asked this process to stop. The engine calls this before a step's all-reduce."""
        if not self.stop.requested:
            return self.run_environment.asked_to_stop()
        self.run_environment.before_stop_request()
        return True

    def _skipped(self, outcome: StepOutcome, fault: Fault) -> Skipped:
        return Skipped(
            step=self.finished_steps,
            loss=outcome.loss if math.isfinite(outcome.loss) else None,
            culprit=fault.culprit,
            sender=self.run_environment.name_of(fault.sender),
            reason=fault.reason,
        )

    def _after_steps(self, step: int) -> None:
        """All replicas have the weights of this step."""
        config, before = self.config, self.merged_steps
        self.merged_steps = step
        if self.engine.basis_is_due(step):
            self._display.working(f"step {step}: moving the subspace")
            update = self.engine.update_basis(self.batch_loader.batch(self.cursor))
            self._tell(BasisChanged(step=step, **vars(update)))
        freq = config.validation.freq
        due = freq and (_passed(freq, before, step) or step == config.training.steps)
        if due and self.batch_loader.dataset_info.validation_batches:
            self._display.working(f"step {step}: measuring the validation loss")
            self._tell(validate(self.engine, self.batch_loader, step))
        if _passed(config.checkpoint.steps, before, step) and step < config.training.steps:
            self._save()

    def _resume_or_start(self) -> None:
        codec_states = self.engine.codec_state_layers
        self.run_environment.fetch(self.engine.layers, codec_states)
        checkpoint, problems = latest_common_checkpoint(
            self.checkpoints, self.engine.layers, self.collectives, optional_layers=codec_states
        )
        changed = list[str]()
        for problem in problems:
            self._tell(SaveFailed(step=0, reason=f"checkpoint ignored on resume: {problem}"))
        if checkpoint is not None:
            refuse_other_model(self.model_config, checkpoint)
            refuse_other_base(str(self.config.model.hf), self.base_sha256, checkpoint)
            names = [self.run_environment.name_of(process) for process in range(self.collectives.size)]
            placed = self.engine.placement.in_words(names)
            changed = changes_since(checkpoint, self.config, self.batch_loader.dataset_info, placed)
            if checkpoint.manifest.step == 0:  # initial weights only: no optimizer, tracker or codec state to restore
                self.engine.start_from(checkpoint)
            else:
                self.engine.restore(checkpoint)
                self.sync.restore(self.engine, checkpoint)
            self.finished_steps = self.merged_steps = self.saved_step = checkpoint.manifest.step
            self._origin = checkpoint.manifest.step, checkpoint.manifest.samples_seen
            self._go_to(self.merged_steps)
        elif self.config.model.initial is not None:
            self.engine.start_from(find_checkpoint(self.config.model.initial, self.engine.layers))
        base = {"base": self.base_sha256} if self.base_sha256 else {}
        self.run_environment.ready(self.engine.model.space.hashes | base)
        self.batch_loader.save_tokenizer()
        info = self.batch_loader.dataset_info
        if self.config.validation.freq and not info.validation_batches and self.collectives.rank == 0:
            where = self.config.data.in_words
            _LOG.warning("no validation loss is measured: %s has no validation text, or less than a batch", where)
        settings = dump_toml(self.config)
        if self.saver.is_leader:
            write_atomically(settings_path(self.config.job.dump_folder), settings.encode())
        started = Started(
            step=self.finished_steps,
            config=settings,
            parameters=sum(p.numel() for p in trainable_parameters(self.engine.model).values()),
            versions=versions(),
            resumed_from=str(checkpoint.path) if checkpoint and checkpoint.manifest.step else None,
            changed=changed,
            dim=self.model_config.dim,
            segments=[self.engine.placement.segments_of(process) for process in range(self.collectives.size)],
            device_classes=self._gather_texts(device_class(self.engine.device)),
            precisions=self._gather_texts(self.engine.precision),
        )
        own = self.run_environment.own_event(started)
        if own is not None:
            self._show_and_log(own)
        self._tell(started)

    def _gather_texts(self, text: str) -> list[str]:
        """A short text of every process. Collective call."""
        return [
            sanitize(found.decode(errors="replace"), 200) for found in self.collectives.all_gather_bytes(text.encode())
        ]

    def _save(self) -> bool:
        """Saves a checkpoint of the weights that all replicas have, unless there is one already; returns False if
        writing failed."""
        step = self.merged_steps
        if step == self.saved_step:
            return True
        started = time.monotonic()
        self._display.working(f"step {step}: saving")
        manifest = new_manifest(
            self.engine.model,
            step=step,
            samples_seen=self.cursor.samples_seen,
            data_sha256=self.batch_loader.dataset_info.sha256,
            run=dump_toml(self.config),
            base_sha256=self.base_sha256,
            rounds=self.sync.rounds,
        )
        try:
            saved = self.saver.save(
                manifest, self.engine.state(with_space=self.saver.is_leader, beside=self.sync.state())
            )
        except ConnectionError:  # a subclass of OSError, but not a disk failure
            raise
        except OSError as error:
            self._tell(SaveFailed(step=step, reason=str(error)))
            return False
        self.saved_step = step
        nbytes = sum(entry.nbytes for entry in saved.manifest.files.values())
        seconds = time.monotonic() - started
        self._tell(Saved(step=step, path=str(saved.path), nbytes=nbytes, seconds=seconds))
        return True

    def _tell(self, event: AnyEvent, text: str = "") -> None:
        """`text`: what the console says of it, in place of the text of the event."""
        self._show_and_log(event, text)
        self.run_environment.on_event(event)

    def _show_and_log(self, event: AnyEvent, text: str = "") -> None:
        self._display.show(event, text)
        try:
            if self._log is not None:
                self._log.write(event)
        except OSError as error:  # training continues on a full disk
            self._display.show(SaveFailed(step=event.step, reason=f"event log: {error}"))


def _passed(interval: int, before: int, step: int) -> bool:
    """True if a multiple of `interval` was reached since `before`."""
    return step // interval > before // interval
