"""One training process of `thinpipe train`, single or a rank of a pipeline, and its error report to the launcher."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist

from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import OtherProcessError, RunFailedError, UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.files import write_atomically
from thinpipe.core.status_line import status_line
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.training.error_file import ERROR_FILE_VARIABLE, ErrorReport
from thinpipe.training.memory_check import check_on_device
from thinpipe.training.observer import Observer
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer
from thinpipe.transport.gloo_group import open_group


class _ObservedRun(RunEnvironment):
    """Hooks of a local run with an observer."""

    def __init__(self, observer: Observer, *, in_group: bool) -> None:
        self.observer, self.quiet, self._in_group = observer, observer.quiet, in_group

    def on_event(self, event: AnyEvent) -> None:
        self.observer.on_event(event)

    def asked_to_stop(self) -> bool:
        return self.observer.asked_to_stop()

    def stops_now(self) -> bool:
        return not self._in_group and self.observer.asked_to_stop()


def train(config: RunConfig, observer: Observer, *, in_group: bool) -> None:
    """Trains in this process, which is one of several if `in_group`; `observer` learns how the run ended.

    Raises every exception of a single process. In a group raises RunFailedError in place of a ConnectionError and, in a
    process that the local launcher has started, of a UserError, which the launcher raises.
    """
    with ExitStack() as stack:
        stack.enter_context(deterministic_algorithms(config.debug.deterministic))
        trainer: Trainer | None = None
        try:
            check_on_device(config)
            group: dist.ProcessGroup | None = None
            if in_group:
                with status_line("waiting for the other processes"):
                    group = stack.enter_context(_open_group(config))
            with status_line("making the model"):
                trainer = Trainer(config, group, _ObservedRun(observer, in_group=in_group))
            if config.job.print_config and trainer.collectives.rank == 0 and not observer.quiet:
                print(dump_toml(config))
                print(f"# the model: {trainer.model_config}")
            trainer.train()
        except Exception as error:
            if in_group:
                _raise_in_group(error, trainer)
            raise
        finally:
            if trainer is not None:
                observer.stop_signal = trainer.stop.signal


@contextmanager
def _open_group(config: RunConfig) -> Iterator[dist.ProcessGroup]:
    """Process group of the run. Closes on exit what it has opened: not a default group that the caller had opened."""
    was_open, group = dist.is_initialized(), dist.group.WORLD
    try:
        group = open_group(config.link, timeout=timedelta(seconds=config.parallelism.timeout_seconds))
        yield group
    finally:
        if not was_open and dist.is_initialized():
            dist.destroy_process_group()
        elif was_open and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _raise_in_group(error: Exception, trainer: Trainer | None) -> NoReturn:
    """Raises the error with the place of this process in its text, and reports it to the launcher, if there is one.

    Called before the sockets close, so that the error file is older than those of processes that fail because they lose
    this one.
    """
    place = f"process {os.environ['RANK']}"
    if trainer is not None:
        stages = trainer.engine.placement.processes[trainer.collectives.rank]
        place += f", stage {' and '.join(map(str, stages))}, step {trainer.finished_steps + 1}"
    expected, user_error = isinstance(error, UserError | ConnectionError), isinstance(error, UserError)
    text = f"{place}: {error}" if expected else f"{place}: {type(error).__name__}: {error}"
    launched = ERROR_FILE_VARIABLE in os.environ
    if launched:
        report = ErrorReport(text=text, user_error=user_error, in_other_process=isinstance(error, OtherProcessError))
        write_atomically(Path(os.environ[ERROR_FILE_VARIABLE]), msgspec.json.encode(report))
    if not expected:
        error.add_note(f"in {place}")
        raise error
    if user_error and not launched:
        raise UserError(text) from error
    raise RunFailedError(text, reported=launched, user_error=user_error) from error
