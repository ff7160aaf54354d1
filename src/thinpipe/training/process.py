"""One training process of `thinpipe train`, single or a rank of a pipeline, and its error report to the launcher."""

import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from threading import Thread

import msgspec
import torch
import torch.distributed as dist

from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import OtherProcessError, RunFailedError, UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.files import write_atomically
from thinpipe.training.error_file import ERROR_FILE_VARIABLE, ErrorReport
from thinpipe.training.observer import Observer
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer
from thinpipe.transport.gloo_group import open_group

_LOG = logging.getLogger(__name__)


class _ObservedRun(RunEnvironment):
    """Hooks of a local run with an observer."""

    def __init__(self, observer: Observer) -> None:
        self.observer, self.quiet = observer, observer.quiet

    def on_event(self, event: AnyEvent) -> None:
        self.observer.on_event(event)

    def asked_to_stop(self) -> bool:
        return self.observer.asked_to_stop()


def train(config: RunConfig, observer: Observer, *, in_group: bool) -> None:
    """Trains in this process, which is one of several if `in_group`; `observer` learns how the run ended.

    Raises every exception of a single process. In a group, reports an exception and raises it, or RunFailedError in
    place of a UserError or a ConnectionError.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer: Trainer | None = None
    group: dist.ProcessGroup | None = None
    try:
        if in_group:
            _stop_without_launcher()
            group = open_group(config.link, timeout=timedelta(seconds=config.parallelism.timeout_seconds))
        trainer = Trainer(config, group, _ObservedRun(observer))
        if config.job.print_config and trainer.collectives.rank == 0:
            print(dump_toml(config))
            print(f"# the model: {trainer.model_config}")
        trainer.train()
    except Exception as error:
        if not in_group:
            raise
        text = _report_error(error, trainer)
        if not isinstance(error, UserError | ConnectionError):
            raise
        raise RunFailedError(text, reported=True, user_error=isinstance(error, UserError)) from error
    finally:
        torch.use_deterministic_algorithms(before)
    if group is not None:
        dist.destroy_process_group()


def _stop_without_launcher() -> None:
    """Sends this process SIGTERM when the launcher dies (end of file on stdin), so that the run saves and stops."""
    if ERROR_FILE_VARIABLE not in os.environ:
        return

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)  # before the warning: nobody may read stderr any more
        _LOG.warning("the launcher has ended: saving a checkpoint and stopping")

    Thread(target=wait, name="waits for the launcher", daemon=True).start()


def _report_error(error: Exception, trainer: Trainer | None) -> str:
    """Reports the error to the launcher, or on stderr without one; returns the text of the report.

    Called before the sockets close, so that the error file is older than those of processes that fail because they lose
    this one.
    """
    place = f"process {os.environ['RANK']}"
    if trainer is not None:
        stages = trainer.engine.placement.processes[trainer.collectives.rank]
        place += f", stage {' and '.join(map(str, stages))}, step {trainer.finished_steps + 1}"
    report = ErrorReport(
        text=f"{place}: {_in_words(error)}",
        user_error=isinstance(error, UserError),
        in_other_process=isinstance(error, OtherProcessError),
    )
    if ERROR_FILE_VARIABLE in os.environ:
        write_atomically(Path(os.environ[ERROR_FILE_VARIABLE]), msgspec.json.encode(report))
    else:
        print(f"thinpipe: {report.text}", file=sys.stderr)
    return report.text


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError | ConnectionError) else f"{type(error).__name__}: {error}"
