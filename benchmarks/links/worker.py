"""One process of `python -m benchmarks.links`: reads commands from its input, runs them with the others, answers each.

Started by the crew as `python -m benchmarks.links.worker` with the variables that torch.distributed reads.
"""

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, assert_never

import msgspec
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.links.bare_engine import LEARNING_RATE, BareEngine
from benchmarks.links.commands import (
    Answer,
    Command,
    MemoryUse,
    Operator,
    Operators,
    Prepare,
    ReadMemory,
    Ready,
    ShowOperators,
    TimeSteps,
    Timing,
)
from benchmarks.links.workload import Run
from thinpipe.config.link import LinkConfig
from thinpipe.core.peak_memory import peak_resident_nbytes
from thinpipe.training.engine import Engine
from thinpipe.transport.gloo_group import init_gloo, open_group

Opener = Callable[[LinkConfig], dist.ProcessGroup]
"""Makes the group of a run; all processes call it."""
TIMEOUT = timedelta(seconds=600)
"""Longer than any step on the slowest link."""
END_SECONDS = 10.0
"""For a quiet end once there are no more commands."""


class PreparedRun:
    """A run that is ready for steps: its engine, its group, its tokens, which never change."""

    def __init__(self, run: Run, opener: Opener) -> None:
        self.run, self.steps = run, 0
        shape, generator = run.shape, torch.Generator().manual_seed(0)
        size = (shape.sequences * shape.microbatches, shape.seq_len + 1)
        self.ids_BW = torch.randint(shape.vocab, size, generator=generator)
        self.group = opener(run.link.config)
        config = run.config
        self.bare = BareEngine(run) if run.bare else None
        self.own = None if run.bare else Engine(config, config.model.resolve(shape.vocab), self.group)

    def step(self) -> tuple[float | None, float | None]:
        """The loss and the share of the step in which this process did not wait, where they are known."""
        if self.own is None:
            assert self.bare is not None
            return self.bare.step(self.ids_BW), None
        outcome = self.own.step(self.steps, self.ids_BW.numpy() if self.own.has_first else None, LEARNING_RATE)
        self.steps += 1
        return outcome.loss, outcome.busy[dist.get_rank()]

    def close(self) -> None:
        self.own = self.bare = None
        gc.collect()
        if self.group is not dist.group.WORLD:
            dist.barrier()  # nobody's last message may be in flight
            self.group.shutdown()


class Worker:
    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self.prepared: list[PreparedRun] = []

    def obey(self, command: Command) -> Answer:
        match command:
            case Prepare(runs):
                self._prepare(runs)
                return Ready()
            case TimeSteps(run, steps):
                return _time(self.prepared[run], steps)
            case ShowOperators(run, rows):
                return _operators(self.prepared[run], rows)
            case ReadMemory():
                held = int(psutil.Process().memory_info().rss)
                return MemoryUse(held_nbytes=held, peak_nbytes=peak_resident_nbytes())
            case _:
                assert_never(command)

    def _prepare(self, runs: Sequence[Run]) -> None:
        there = {prepared.run: prepared for prepared in self.prepared}
        self.prepared = []
        for run, prepared in there.items():
            if run not in runs:
                prepared.close()
        self.prepared = [there.get(run) or PreparedRun(run, self._opener) for run in runs]


def _time(prepared: PreparedRun, steps: int) -> Timing:
    seconds, busy, loss = [], [], None
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        loss, share = prepared.step()
        seconds.append(time.perf_counter() - started)
        busy += [] if share is None else [share]
    return Timing(seconds=seconds, busy=busy, loss=loss)


def _operators(prepared: PreparedRun, rows: int) -> Operators:
    dist.barrier()
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        prepared.step()
    step_milliseconds = (time.perf_counter() - started) * 1e3
    averages = sorted(profiler.key_averages(), key=lambda entry: -entry.self_cpu_time_total)
    table = [
        Operator(name=entry.key, milliseconds=entry.self_cpu_time_total / 1e3, calls=entry.count) for entry in averages
    ]
    others = table[rows:]
    rest = Operator(
        name="all others",
        milliseconds=sum(operator.milliseconds for operator in others),
        calls=sum(operator.calls for operator in others),
    )
    return Operators(step_milliseconds=step_milliseconds, operators=[*table[:rows], rest])


def open_gloo(link: LinkConfig) -> dist.ProcessGroup:
    return open_group(link, timeout=TIMEOUT)


def main(opener: Opener = open_gloo) -> None:
    answers, commands = _take_output(), _hear_commands()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_gloo(TIMEOUT)
    worker = Worker(opener)
    while line := commands.get():
        command: Command = msgspec.json.decode(line, type=Command)
        answers.write(msgspec.json.encode(worker.obey(command)) + b"\n")
        answers.flush()
    worker.obey(Prepare(runs=[]))
    dist.destroy_process_group()


def _hear_commands() -> queue.SimpleQueue[bytes]:
    """Lines of the input, then an empty one. Whoever gives commands may also be killed: then this process ends soon."""
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            commands.put(line)
        commands.put(b"")
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, name="receives commands", daemon=True).start()
    return commands


def _take_output() -> IO[bytes]:
    """Answers go where output went; whatever else is printed goes to the errors."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
