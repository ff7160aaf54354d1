"""The one training loop: data in, steps, validation, basis updates, checkpoints, events. `run` is `thinpipe train`.

It asks an engine for steps and does not know where the segments live.
"""

import math
import time
import tomllib
from collections.abc import Iterator
from itertools import islice

import msgspec
import torch

from thinpipe.boundary.settings import BoundarySection
from thinpipe.checkpoint import Checkpoint, CheckpointFolder, describe, find_checkpoint, model_config_of
from thinpipe.checkpoint.state import versions
from thinpipe.core.config import differences, dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    EventLog,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
)
from thinpipe.core.files import write_atomically
from thinpipe.data import Batches, Cursor, Tokenizer, Tokens, has_tokens, sequential_batches
from thinpipe.models import ModelConfig
from thinpipe.train.config import ParallelismSection, RunConfig
from thinpipe.train.console import Display, open_display
from thinpipe.train.engine import Engine, Ids
from thinpipe.train.schedule import lr_factor
from thinpipe.train.stopping import StopRequest

MOST_SKIPPED_IN_A_ROW = 3


class Trainer:
    """One run in one process: `train` goes on from wherever the run's folder says it is."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        folder = config.data.path
        self.tokens = Tokens(folder / "train")
        self.validation = Tokens(folder / "validation") if has_tokens(folder / "validation") else None
        training = config.training
        self.batches = Batches(
            self.tokens, seq_len=training.seq_len, batch_size=training.global_batch_size, seed=config.debug.seed
        )
        self.checkpoints = CheckpointFolder(config.job.dump_folder / "checkpoints")
        self.own, self.problems = self.checkpoints.newest_whole()
        self.initial = find_checkpoint(config.model.initial) if config.model.initial and self.own is None else None
        self.model_config = self._model_config()
        self.engine = Engine(config, self.model_config)
        self.finished_steps, self.cursor, self.saved_step = 0, Cursor(), -1

    def _model_config(self) -> ModelConfig:
        vocabulary, section = self.tokens.manifest.vocabulary.size, self.config.model
        if section.initial is None:
            model = section.resolve(vocabulary)
        else:
            origin = self.own or self.initial
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
        if self.config.parallelism.pipeline_parallel_schedule != ParallelismSection().pipeline_parallel_schedule:
            raise UserError("parallelism.pipeline_parallel_schedule has no effect in one process: leave it out")
        if model.subspace.width is None and self.config.optimizer.second_moment != "row":
            raise UserError("optimizer.second_moment is for subspace models: leave it out, or set model.subspace.width")
        if self.config.training.seq_len > model.max_seq_len:
            raise UserError(
                f"training.seq_len {self.config.training.seq_len} is above the model's max_seq_len "
                f"{model.max_seq_len}: lower it, or set model.max_seq_len"
            )
        return model

    def train(self) -> str:
        """Runs to the last step, or until it is asked or forced to stop; returns the reason."""
        config = self.config
        config.job.dump_folder.mkdir(parents=True, exist_ok=True)
        total = config.training.steps
        with (
            StopRequest() as stop,
            EventLog(config.job.dump_folder / "events.jsonl") as log,
            open_display(log_freq=config.metrics.log_freq, total_steps=total) as display,
        ):
            self._resume_or_start(log, display)
            skipped, reason = 0, "finished"
            while self.finished_steps < total:
                event = self._step()
                _tell(event, log, display)
                skipped = skipped + 1 if isinstance(event, Skipped) else 0
                if skipped == MOST_SKIPPED_IN_A_ROW:
                    reason = "not_finite"
                    break
                self._after_step(log, display)
                if stop.requested:
                    reason = "signal"
                    break
            if reason != "not_finite" and not self._save(log, display):
                reason = "not_saved"
            _tell(Stopped(step=self.finished_steps, reason=reason), log, display)
        return reason

    def _step(self) -> AnyEvent:
        """One batch. The data moves on and the step counts even when it is skipped, so that nothing loops for ever."""
        started = time.monotonic()
        batch = self.batches.batch_at(self.cursor)
        lr = self.config.optimizer.lr * lr_factor(
            self.finished_steps, self.config.training.steps, self.config.lr_scheduler
        )
        outcome = self.engine.step(self.finished_steps, batch.ids_BW, lr)
        self.cursor = batch.following
        self.finished_steps += 1
        if outcome.culprit is not None:
            loss = outcome.loss if math.isfinite(outcome.loss) else None
            return Skipped(step=self.finished_steps, loss=loss, culprit=outcome.culprit)
        seconds = time.monotonic() - started
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        return Step(
            step=self.finished_steps,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=lr,
            tokens=self.finished_steps * tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
        )

    def _after_step(self, log: EventLog, display: Display) -> None:
        config, step = self.config, self.finished_steps
        if self.engine.basis_is_due(step):
            update = self.engine.update_basis(self.batches.batch_at(self.cursor).ids_BW)
            assert update is not None
            _tell(BasisChanged(step=step, **vars(update)), log, display)
        due = config.validation.freq and (step % config.validation.freq == 0 or step == config.training.steps)
        if due and self.validation is not None:
            _tell(self._validate(), log, display)
        if step % config.checkpoint.interval == 0 and step < config.training.steps:
            self._save(log, display)

    def _validate(self) -> Validated:
        assert self.validation is not None
        started = time.monotonic()
        loss, tokens = self.engine.evaluate(self._validation_batches())
        return Validated(
            step=self.finished_steps,
            loss=loss if math.isfinite(loss) else None,
            bits_per_byte=self.validation.manifest.bits_per_byte(loss) if math.isfinite(loss) else None,
            tokens=tokens,
            seconds=time.monotonic() - started,
        )

    def _validation_batches(self) -> Iterator[Ids]:
        assert self.validation is not None
        """Whole batches only: the segments of a pipeline have fixed shapes, and every placement sees the same."""
        training = self.config.training
        size = training.global_batch_size
        batches = sequential_batches(self.validation, seq_len=training.seq_len, batch_size=size)
        return (ids for ids, _ in islice(batches, self.config.validation.steps or None) if len(ids) == size)

    def _resume_or_start(self, log: EventLog, display: Display) -> None:
        checkpoint, changed = self.own, list[str]()
        for problem in self.problems:
            _tell(SaveFailed(step=0, reason=f"passed over on loading: {problem}"), log, display)
        if checkpoint is not None:
            _refuse_other_model(self.model_config, model_config_of(checkpoint), str(checkpoint.path))
            changed = self._changes_since(checkpoint)
            self.engine.restore(checkpoint)
            self.finished_steps = self.saved_step = checkpoint.manifest.step
            self.cursor = Cursor(samples_seen=checkpoint.manifest.samples_seen)
        elif self.initial is not None:
            self.engine.start_from(self.initial)
        self._keep_tokenizer()
        settings = dump_toml(self.config)
        write_atomically(self.config.job.dump_folder / "run.toml", settings.encode())
        started = Started(
            step=self.finished_steps,
            config=settings,
            parameters=sum(p.numel() for p in self.engine.model.parameters()),
            versions=versions(),
            resumed_from=str(checkpoint.path) if checkpoint else None,
            changed=changed,
        )
        _tell(started, log, display)

    def _changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Settings that differ from those of the checkpoint; refuses those that would give its cursor another sense."""
        path = checkpoint.path
        if checkpoint.manifest.data_sha256 != self.tokens.manifest.content_sha256:
            raise UserError(f"{path} was trained on other tokens than {self.config.data.path}: use the same data")
        changed = differences(tomllib.loads(checkpoint.manifest.run), tomllib.loads(dump_toml(self.config)))
        for setting in ("training.seq_len", "debug.seed"):
            if setting in changed:
                raise UserError(
                    f"{path} was saved with {setting} {changed[setting]}: it decides which samples come next"
                )
        return [f"{setting} {change}" for setting, change in changed.items()]

    def _keep_tokenizer(self) -> None:
        """The run's folder is all that is needed to use the model."""
        source, target = self.config.data.path / "tokenizer", self.config.job.dump_folder / "tokenizer"
        if source.is_dir():
            Tokenizer.load(source).save(target)

    def _save(self, log: EventLog, display: Display) -> bool:
        """True when the state is on the disk."""
        if self.saved_step == self.finished_steps:
            return True
        started = time.monotonic()
        manifest = describe(
            self.engine.model,
            step=self.finished_steps,
            samples_seen=self.cursor.samples_seen,
            data_sha256=self.tokens.manifest.content_sha256,
            run=dump_toml(self.config),
        )
        try:
            saved = self.checkpoints.save(manifest, self.engine.state())
            self.checkpoints.keep_latest(self.config.checkpoint.keep_latest_k)
        except OSError as error:
            _tell(SaveFailed(step=self.finished_steps, reason=str(error)), log, display)
            return False
        self.saved_step = self.finished_steps
        nbytes = sum(entry.nbytes for entry in saved.manifest.files.values())
        seconds = time.monotonic() - started
        _tell(Saved(step=self.finished_steps, path=str(saved.path), nbytes=nbytes, seconds=seconds), log, display)
        return True


def _tell(event: AnyEvent, log: EventLog, display: Display) -> None:
    display.show(event)
    try:
        log.write(event)
    except OSError as error:  # a full disk is no reason to stop computing
        display.show(SaveFailed(step=event.step, reason=f"event log: {error}"))


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


def run(config: RunConfig) -> int:
    """`thinpipe train`: exit code 1 when the run had to give up."""
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer = Trainer(config)
    if config.job.print_config:
        print(dump_toml(config))
        print(f"# the model: {trainer.model_config}")
    return 1 if trainer.train() in ("not_finite", "not_saved") else 0
