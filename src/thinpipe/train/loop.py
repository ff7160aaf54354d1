"""The one training loop: data in, steps, validation, basis updates, checkpoints, events.

It asks an engine for steps and does not know where the segments live.
"""

import dataclasses
import math
import time
import tomllib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch.distributed as dist

from thinpipe.boundary.settings import BoundarySection
from thinpipe.checkpoint import Checkpoint, CheckpointFolder, describe, find_checkpoint, model_config_of
from thinpipe.checkpoint.state import versions
from thinpipe.core.config import differences, dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    EventLog,
    Retried,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
)
from thinpipe.core.files import write_atomically
from thinpipe.data import Cursor
from thinpipe.models import ModelConfig
from thinpipe.train.config import DataSection, JobSection, MetricsSection, RunConfig
from thinpipe.train.console import Display, open_display
from thinpipe.train.engine import Engine, StepOutcome
from thinpipe.train.faults import Fault, PoisonedError
from thinpipe.train.feed import Feed
from thinpipe.train.saving import Saver, agree
from thinpipe.train.schedule import lr_factor
from thinpipe.train.stopping import StopRequest
from thinpipe.train.supplies import Supplies

MOST_SKIPPED_IN_A_ROW = 3
_LOCAL = ("job.", "data.", "metrics.", "checkpoint.")
"""Settings that may differ from machine to machine."""


class Trainer:
    """One run, or one process's part of it: `train` goes on from wherever the run's folder says it is."""

    def __init__(
        self, config: RunConfig, group: dist.ProcessGroup | None = None, supplies: Supplies | None = None
    ) -> None:
        self.config, self.supplies = config, supplies or Supplies()
        self.exchange = self.supplies.exchange(group)
        self._refuse_other_settings()
        self.feed = Feed(config, self.exchange, self.supplies.tokens)
        self.checkpoints = CheckpointFolder(config.job.dump_folder / "checkpoints")
        origin = self.checkpoints.newest_whole(layers=())[0]
        if origin is None and config.model.initial is not None:
            origin = find_checkpoint(config.model.initial, layers=())
        self.model_config = self._model_config(origin)
        self.engine = Engine(config, self.model_config, group, self.exchange)
        self.finished_steps, self.cursor, self.saved_step = 0, Cursor(), -1
        self._skips = 0
        """Steps in a row, up to now."""
        self._stop = StopRequest()

    _log: EventLog | None
    _display: Display

    def _refuse_other_settings(self) -> None:
        """All processes must have been started with the same, but for what each machine has its own way with."""
        mine = tomllib.loads(dump_toml(_without_local(self.config)))
        told = self.exchange.spread(dump_toml(_without_local(self.config)).encode())
        changed = differences(tomllib.loads(told.decode()), mine)
        if changed:
            listed = "; ".join(f"{setting} {change}" for setting, change in changed.items())
            raise UserError(f"process {self.exchange.rank} has other settings than process 0: {listed}")

    def _model_config(self, origin: Checkpoint | None) -> ModelConfig:
        vocabulary, section = self.feed.facts.vocab_size, self.config.model
        if section.initial is None:
            model = section.resolve(vocabulary)
        else:
            assert origin is not None
            model = model_config_of(origin)
            if vocabulary > model.vocab_size:
                raise UserError(
                    f"the tokens in {self.config.data.path} need {vocabulary} ids, but the model in {section.initial} "
                    f"has {model.vocab_size}: tokenize with --tokenizer {section.initial / 'tokenizer'}"
                )
        if not model.boundaries and self.config.boundary != BoundarySection():
            raise UserError(
                "[boundary] says how the state crosses a cut, but model.boundaries is empty: set it, or leave it out"
            )
        if model.subspace.width is None and self.config.optimizer.second_moment != "row":
            raise UserError("optimizer.second_moment is for subspace models: leave it out, or set model.subspace.width")
        if self.config.training.seq_len > model.max_seq_len:
            raise UserError(
                f"training.seq_len {self.config.training.seq_len} is above the model's max_seq_len "
                f"{model.max_seq_len}: lower it, or set model.max_seq_len"
            )
        return model

    @property
    def asked_here(self) -> bool:
        """A signal asked this process to stop."""
        return self._stop.requested

    def train(self) -> str:
        """Runs to the last step, or until it is asked or forced to stop; returns the reason."""
        config = self.config
        total = config.training.steps
        self.saver = Saver(
            self.checkpoints,
            self.exchange,
            keep_latest=config.checkpoint.keep_latest_k,
            needed=self.supplies.needed,
        )
        with (
            self._stop as stop,
            open_log(config.job.dump_folder / "events.jsonl" if self.exchange.rank == 0 else None) as log,
            open_display(config, leads=self.exchange.rank == 0) as display,
        ):
            self._log, self._display = log, display
            self._resume_or_start()
            reason = "finished"
            while self.finished_steps < total:
                with self.supplies.step():
                    event, asked_to_stop = self._step(stop)
                self._tell(event)
                self._skips = self._skips + 1 if isinstance(event, Skipped) else 0
                if self._skips == MOST_SKIPPED_IN_A_ROW:
                    reason = "not_finite"
                    break
                self._after_step()
                if asked_to_stop:
                    reason = "signal"
                    break
            if reason != "not_finite" and not self._save():
                reason = "not_saved"
            self._tell(Stopped(step=self.finished_steps, reason=reason))
        return reason

    def _step(self, stop: StopRequest) -> tuple[AnyEvent, bool]:
        """One batch, and whether any process was asked to stop.

        The data moves on and the step counts even when it is skipped, so that nothing loops for ever.
        """
        started = time.monotonic()
        lr = self.config.optimizer.lr * lr_factor(
            self.finished_steps, self.config.training.steps, self.config.lr_scheduler
        )
        outcome = self._compute(lr, stop)
        self.cursor = self.feed.following(self.cursor)
        self.finished_steps += 1
        if outcome.fault is not None:
            return self._skipped(outcome, outcome.fault), outcome.stop
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

    def _compute(self, lr: float, stop: StopRequest) -> StepOutcome:
        """A step that went wrong has left no trace: it is tried again, until the same process is wrong again.

        Raises PoisonedError where somebody can remove that process; not after a step that was skipped: no weight has
        changed since, and weights that have diverged make everybody look bad.
        """
        ids_BW, number, suspects = self.feed.batch(self.cursor), self.finished_steps + 1, set[int]()
        while True:
            outcome = self.engine.step(
                self.finished_steps,
                ids_BW,
                lr,
                asked_to_stop=lambda: stop.requested or self.supplies.asked_to_stop(),
            )
            fault = outcome.fault
            if fault is None:
                return outcome
            if fault.sender in suspects:
                if fault.boundary is not None and not self._skips and self.supplies.may_accuse(number):
                    raise PoisonedError(number, fault)
                return outcome
            suspects.add(fault.sender)
            self._tell(
                Retried(
                    step=number,
                    culprit=fault.culprit,
                    sender=self.supplies.name_of(fault.sender),
                    boundary=fault.boundary,
                    forward=fault.forward,
                    reason=fault.reason,
                )
            )

    def _skipped(self, outcome: StepOutcome, fault: Fault) -> Skipped:
        return Skipped(
            step=self.finished_steps,
            loss=outcome.loss if math.isfinite(outcome.loss) else None,
            culprit=fault.culprit,
            sender=self.supplies.name_of(fault.sender),
            reason=fault.reason,
        )

    def _after_step(self) -> None:
        config, step = self.config, self.finished_steps
        if self.engine.basis_is_due(step):
            update = self.engine.update_basis(self.feed.batch(self.cursor))
            self._tell(BasisChanged(step=step, **vars(update)))
        due = config.validation.freq and (step % config.validation.freq == 0 or step == config.training.steps)
        if due and self.feed.facts.validation_batches:
            self._tell(self._validate())
        if step % config.checkpoint.steps == 0 and step < config.training.steps:
            self._save()

    def _validate(self) -> Validated:
        started = time.monotonic()
        loss, tokens = self.engine.evaluate(self.feed.validation_batches())
        finite, per_nat = math.isfinite(loss), self.feed.facts.bits_per_byte_per_nat
        return Validated(
            step=self.finished_steps,
            loss=loss if finite else None,
            bits_per_byte=loss * per_nat if finite and per_nat is not None else None,
            tokens=tokens,
            seconds=time.monotonic() - started,
        )

    def _resume_or_start(self) -> None:
        memories = self.engine.memory_layers
        self.supplies.fetch(self.engine.layers, memories)
        checkpoint, problems = agree(self.checkpoints, self.engine.layers, self.exchange, if_saved=memories)
        changed = list[str]()
        for problem in problems:
            self._tell(SaveFailed(step=0, reason=f"passed over on loading: {problem}"))
        if checkpoint is not None:
            _refuse_other_model(self.model_config, model_config_of(checkpoint), str(checkpoint.path))
            changed = self._changes_since(checkpoint) if checkpoint.manifest.step else []
            if checkpoint.manifest.step == 0:  # made before any training: nothing remembers anything
                self.engine.start_from(checkpoint)
            else:
                self.engine.restore(checkpoint)
            self.finished_steps = self.saved_step = checkpoint.manifest.step
            self.cursor = Cursor(samples_seen=checkpoint.manifest.samples_seen)
        elif self.config.model.initial is not None:
            self.engine.start_from(find_checkpoint(self.config.model.initial, self.engine.layers))
        self.supplies.ready(self.engine.model.space.hashes)
        self.feed.keep_tokenizer()
        settings = dump_toml(self.config)
        if self.saver.leads:
            write_atomically(self.config.job.dump_folder / "run.toml", settings.encode())
        started = Started(
            step=self.finished_steps,
            config=settings,
            parameters=sum(p.numel() for p in self.engine.model.parameters()),
            versions=versions(),
            resumed_from=str(checkpoint.path) if checkpoint and checkpoint.manifest.step else None,
            changed=changed,
            dim=self.model_config.dim,
            segments=[self.engine.placement.segments_of(process) for process in range(self.exchange.size)],
        )
        self._tell(started)

    def _changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Settings that differ from those of the checkpoint; refuses those that would give its cursor another sense."""
        path = checkpoint.path
        if checkpoint.manifest.data_sha256 != self.feed.facts.sha256:
            raise UserError(f"{path} was trained on other tokens than {self.config.data.path}: use the same data")
        changed = differences(tomllib.loads(checkpoint.manifest.run), tomllib.loads(dump_toml(self.config)))
        for setting in ("training.seq_len", "debug.seed"):
            if setting in changed:
                raise UserError(
                    f"{path} was saved with {setting} {changed[setting]}: it decides which samples come next"
                )
        return [f"{setting} {change}" for setting, change in changed.items() if not setting.startswith(_LOCAL)]

    def _save(self) -> bool:
        """True when the state is on the disk."""
        if self.saved_step == self.finished_steps:
            return True
        started = time.monotonic()
        manifest = describe(
            self.engine.model,
            step=self.finished_steps,
            samples_seen=self.cursor.samples_seen,
            data_sha256=self.feed.facts.sha256,
            run=dump_toml(self.config),
        )
        try:
            saved = self.saver.save(manifest, self.engine.state(with_space=self.saver.leads))
        except ConnectionError:  # is an OSError, and no matter of this disk
            raise
        except OSError as error:
            self._tell(SaveFailed(step=self.finished_steps, reason=str(error)))
            return False
        self.saved_step = self.finished_steps
        nbytes = sum(entry.nbytes for entry in saved.manifest.files.values())
        seconds = time.monotonic() - started
        self._tell(Saved(step=self.finished_steps, path=str(saved.path), nbytes=nbytes, seconds=seconds))
        return True

    def _tell(self, event: AnyEvent) -> None:
        self._display.show(event)
        try:
            if self._log is not None:
                self._log.write(event)
        except OSError as error:  # a full disk is no reason to stop computing
            self._display.show(SaveFailed(step=event.step, reason=f"event log: {error}"))
        self.supplies.heard(event)


def _refuse_other_model(asked: ModelConfig, saved: ModelConfig, path: str) -> None:
    if asked == saved:
        return
    first, second = msgspec.to_builtins(asked), msgspec.to_builtins(saved)
    differing = [
        f"{key}: {first.get(key)} here, {second.get(key)} there" for key in first if first[key] != second.get(key)
    ]
    raise UserError(
        f"the run's folder holds another model ({path}; {'; '.join(differing) or 'another family'}): "
        "choose another job.dump_folder, or the settings it was begun with"
    )


def open_log(path: Path | None) -> AbstractContextManager[EventLog | None]:
    """Process 0 keeps the log of a run."""
    return nullcontext() if path is None else EventLog(path)


def _without_local(config: RunConfig) -> RunConfig:
    return dataclasses.replace(
        config,
        job=JobSection(),
        data=DataSection(),
        boundary=dataclasses.replace(config.boundary, store=None),
        training=dataclasses.replace(config.training, device="auto"),
        metrics=MetricsSection(),
    )
