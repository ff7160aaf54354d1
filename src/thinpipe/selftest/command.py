"""`thinpipe selftest`: runs all checks with a progress bar, prints a page, writes the report, keeps the calibration."""

import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from thinpipe.config.commands import SelftestConfig
from thinpipe.core.errors import UserError
from thinpipe.device.choice import choose_device, make_current
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.device.memory import device_name
from thinpipe.doctor.finding import findings_table
from thinpipe.planning.calibration import device_key, save_calibration
from thinpipe.selftest.boundaries import check_boundaries
from thinpipe.selftest.check import RECIPE_NAMES, Check, CheckResult, Subject, Use, run_check
from thinpipe.selftest.copies import check_copies, check_copy_rates, check_offload
from thinpipe.selftest.kernels import check_kernels, check_random_numbers
from thinpipe.selftest.memory import check_memory
from thinpipe.selftest.processes import check_processes
from thinpipe.selftest.report import Report, make_report, save
from thinpipe.selftest.speed import check_attention, check_block_time, check_recipe, check_speed
from thinpipe.selftest.steps import Reference, check_repeats, check_steps

_QUICK_SUSTAINED_SECONDS = 1.0
_MIN_SUSTAINED_SECONDS = 5.0
_COLOURS = {"This": "green", "Do": "bold red", "Cannot": "yellow"}
"""Style of a verdict's sentence, by its first word."""


def checks(sustained_seconds: float) -> list[Check]:
    """All checks, in the order in which they run. Expected seconds are those of a laptop's CPU."""
    reference = Reference()
    bf16: tuple[Use, ...] = ("bf16-mixed", "bf16")
    several: tuple[Use, ...] = ("several processes",)
    return [
        Check(
            name="operations in float32",
            uses=RECIPE_NAMES,
            seconds=1,
            run=partial(check_kernels, dtype=torch.float32),
        ),
        Check(name="operations in bfloat16", uses=bf16, seconds=1, run=partial(check_kernels, dtype=torch.bfloat16)),
        Check(name="random numbers", uses=RECIPE_NAMES, seconds=1, run=check_random_numbers),
        *(
            Check(
                name=f"steps in {name}",
                uses=(name,),
                seconds=10,
                run=partial(check_steps, recipe=name, reference=reference),
            )
            for name in RECIPE_NAMES
        ),
        Check(name="repeated steps", uses=several, seconds=2, run=check_repeats),
        Check(name="boundary methods", uses=several, seconds=3, run=check_boundaries),
        Check(name="copies", uses=several, seconds=2, run=check_copies),
        Check(name="offload", uses=("offload",), seconds=2, run=check_offload),
        Check(name="two processes", uses=several, seconds=15, run=check_processes),
        Check(name="memory law", uses=("memory figures",), seconds=15, run=check_memory),
        Check(name="speed", uses=(), seconds=sustained_seconds, run=check_speed),
        Check(name="copy rates", uses=(), seconds=1, run=check_copy_rates),
        Check(name="time of a block", uses=(), seconds=1, run=check_block_time),
        Check(name="attention kernel", uses=(), seconds=1, run=check_attention),
        *(
            Check(name=f"recipe {name}", uses=(name,), seconds=8, run=partial(check_recipe, recipe=name))
            for name in RECIPE_NAMES
        ),
    ]


def run(config: SelftestConfig) -> int:
    """Exit code 1 if anything is wrong."""
    device = choose_device(config.device)
    make_current(device)
    if config.output.exists() and not config.output.is_dir():
        raise UserError(f"{config.output} is a file: name a folder with --output")
    with deterministic_algorithms(True):
        pass  # sets what cuBLAS reads when it starts, before the first product
    console = Console(highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sustained = _sustained_seconds(config)
        subject = Subject(device, Path(folder), quick=config.quick, sustained_seconds=sustained)
        results = _run_with_bar(checks(sustained), subject)
    report = make_report(subject, results, time.monotonic() - began)
    for line in page(report):
        console.print(line)
    written = save(report, config.output)
    console.print(f"\nTo report it, paste {written[1]} into an issue (no names, paths or addresses are in it).")
    if not report.is_wrong and not config.quick:  # a quick test does not measure what a device sustains
        kept = save_calibration(device_key(device.type, device_name(device)), subject.calibration)
        console.print(f"Kept for `plan`, `train` and `join`: {kept}")
    return int(report.is_wrong)


def _sustained_seconds(config: SelftestConfig) -> float:
    """What the other checks leave of the wanted duration."""
    if config.quick:
        return _QUICK_SUSTAINED_SECONDS
    return max(_MIN_SUSTAINED_SECONDS, 60 * config.minutes - sum(check.seconds for check in checks(0)))


class _Bar(Progress):
    """A bar in expected seconds, which moves with the clock while a check runs."""

    floor, ceiling, began = 0.0, 0.0, 0.0

    def begin(self, description: str, seconds: float) -> None:
        self.floor, self.ceiling, self.began = self.ceiling, self.ceiling + seconds, time.monotonic()
        self.update(self.task_ids[0], description=description, completed=self.floor)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = min(self.ceiling, self.floor + time.monotonic() - self.began)
        return super().get_renderables()


def _run_with_bar(planned: Sequence[Check], subject: Subject) -> list[CheckResult]:
    """A progress bar on stderr with the time left; silent if stderr is not a terminal."""
    console, results = Console(stderr=True), []
    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.remaining:.0f} s left"))
    with _Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        bar.add_task("", total=sum(check.seconds for check in planned))
        for check in planned:
            bar.begin(check.name, check.seconds)
            results.append(run_check(check, subject))
    return results


def page(report: Report) -> list[RenderableType]:
    """The report for a terminal: verdict first."""
    return [
        Text(f"thinpipe selftest on {report.device} ({report.device_type}), {report.seconds:.0f} s\n", style="bold"),
        *(Text(sentence, style=_COLOURS.get(sentence.split()[0], "")) for sentence in report.verdict),
        Text(""),
        findings_table([result.finding for result in report.checks], fixes_below=True),
    ]
