"""Two processes on this machine, as `thinpipe train` launches them, against one process with all segments."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thinpipe.config.run import RunConfig
from thinpipe.core.events import Step, read_events
from thinpipe.core.run_folder import events_path
from thinpipe.doctor.finding import Finding, ok, problem
from thinpipe.selftest.check import REPORT_IT, Figures, Subject
from thinpipe.selftest.workload import cut_run, write_tokens
from thinpipe.training.launch import train
from thinpipe.training.observer import Observer

_STEPS, _QUICK_STEPS = 20, 4
_SPREAD = 10.0
"""How many times further two processes may be from one process than one process is from its own repetition, on a device
that does not repeat its bits."""


def check_processes(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Equal bits if the device repeats itself with debug.deterministic, else a difference of the size of its own
    spread. With boundaries, a change of basis, gloo and all copies."""
    write_tokens(subject.folder)
    steps = _QUICK_STEPS if subject.quick else _STEPS

    def config(processes: int, name: str) -> RunConfig:
        deterministic = subject.is_deterministic and not subject.is_cpu  # a CPU repeats itself without
        return cut_run(
            subject.folder, name, subject.device, processes=processes, steps=steps, deterministic=deterministic
        )

    with _threads_of_launched_processes(2):
        one = _numbers(config(1, "one"))
    two = _numbers(config(2, "two"))
    apart = _apart(two, one)
    figures: Figures = {"steps": steps, "apart": apart}
    if apart == 0:
        return ok(what, f"{steps} steps in two processes equal those of one process in every bit"), figures
    with _threads_of_launched_processes(2):
        spread = _apart(_numbers(config(1, "again")), one)
    figures["spread"] = spread
    text = f"losses of two processes are {apart:.1e} from those of one; one process is {spread:.1e} from itself"
    if apart <= _SPREAD * spread:
        return ok(what, text), figures
    return problem(what, text, REPORT_IT), figures


def _numbers(config: RunConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run."""
    observer = Observer(quiet=True)
    train(config, observer)
    if observer.stop_signal is not None:  # which has ended this run, and is meant for the whole test
        raise KeyboardInterrupt
    events = read_events(events_path(config.job.dump_folder))
    return [(event.loss, event.grad_norm) for event in events if isinstance(event, Step)]


def _apart(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """Largest difference, relative; infinite if steps are missing."""
    if len(found) != len(expected):
        return float("inf")
    pairs = [(one, other) for step in zip(found, expected, strict=True) for one, other in zip(*step, strict=True)]
    return max(abs(one - other) / abs(other) for one, other in pairs)


@contextmanager
def _threads_of_launched_processes(degree: int) -> Iterator[None]:
    """As many threads as each launched process has: the bits of a CPU depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // degree)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
