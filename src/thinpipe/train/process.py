"""One process of `thinpipe train`: alone, or with its stages of a pipeline; and what it leaves behind when it fails."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from threading import Thread

import msgspec
import torch
import torch.distributed as dist

from thinpipe.core.config import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.train.config import RunConfig
from thinpipe.train.failure import ERROR_FILE, Failure
from thinpipe.train.loop import Trainer
from thinpipe.transport.groups import open_group


def train(config: RunConfig, *, in_group: bool) -> int:
    """Exit code 1 when the run had to give up, 2 when what was asked for makes no sense."""
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer: Trainer | None = None
    group: dist.ProcessGroup | None = None
    try:
        if in_group:
            _stop_without_launcher()
            group = open_group(config.link, timeout=timedelta(seconds=config.parallelism.timeout_seconds))
        trainer = Trainer(config, group)
        if config.job.print_config and trainer.exchange.rank == 0:
            print(dump_toml(config))
            print(f"# the model: {trainer.model_config}")
        reason = trainer.train()
    except Exception as error:
        if not in_group:
            raise
        _leave_note(error, trainer)
        if not isinstance(error, UserError | ConnectionError):
            raise
        return 2 if isinstance(error, UserError) else 1
    if group is not None:
        dist.destroy_process_group()
    return 1 if reason in ("not_finite", "not_saved") else 0


def _stop_without_launcher() -> None:
    """A launcher that is gone closes this process's input: then the run saves and stops, as if it had been told to."""
    if ERROR_FILE not in os.environ:
        return

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, name="waits for the launcher", daemon=True).start()


def _leave_note(error: Exception, trainer: Trainer | None) -> None:
    """Before the sockets close, so that it is older than the notes of those who lose this process."""
    place = f"process {os.environ['RANK']}"
    if trainer is not None:
        stages = trainer.engine.placement.processes[trainer.exchange.rank]
        place += f", stage {' and '.join(map(str, stages))}, step {trainer.finished_steps + 1}"
    failure = Failure(text=f"{place}: {_in_words(error)}", user_error=isinstance(error, UserError))
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE]).write_bytes(msgspec.json.encode(failure))
    else:
        print(f"thinpipe: {failure.text}", file=sys.stderr)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError | ConnectionError) else f"{type(error).__name__}: {error}"
