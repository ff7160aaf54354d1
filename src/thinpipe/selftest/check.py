"""One check of the self-test: its name, the seconds that it may take, what depends on it, and its result."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import torch

from thinpipe.config.precision import Recipe, recipe_of
from thinpipe.core.errors import UserError
from thinpipe.device.device_class import deterministic_algorithms, device_class
from thinpipe.device.memory import device_name
from thinpipe.device.precision import has_bf16_units, set_float32_products
from thinpipe.doctor.finding import Finding, not_checked, problem
from thinpipe.planning.calibration import Calibration

RecipeName = Literal["fp32", "bf16-mixed", "bf16"]
RECIPE_NAMES: tuple[RecipeName, ...] = ("fp32", "bf16-mixed", "bf16")
Use = Literal["fp32", "bf16-mixed", "bf16", "offload", "several processes", "memory figures"]
"""What the machine can be used for: a precision recipe, optimiser state in host memory, runs of several processes (a
hub's too), and memory figures of `plan`, `train` and the hub."""
Figures = dict[str, float | str]
REPORT_IT = "Report it with the file below: thinpipe is wrong on this device, or the device is."


class Subject:
    """The device under test, and what checks share."""

    def __init__(self, device: torch.device, folder: Path, *, quick: bool, sustained_seconds: float) -> None:
        """`folder`: empty, for temporary files; `sustained_seconds`: of the speed measurement."""
        self.device, self.folder, self.quick, self.sustained_seconds = device, folder, quick, sustained_seconds
        self.calibration = Calibration(torch=str(torch.__version__))
        """Figures measured so far."""
        self.flops = 0.0
        """FLOP/s of matrix products; 0 before they were measured."""

    def recipe(self, name: RecipeName | Literal["auto"]) -> Recipe:
        """Raises UserError for a recipe that the device refuses."""
        return recipe_of(name, has_bf16_units=has_bf16_units(self.device), device=device_name(self.device))

    def calibrate(self, **figures: object) -> None:
        self.calibration = msgspec.structs.replace(self.calibration, **figures)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @cached_property
    def is_deterministic(self) -> bool:
        """True if the device promises to repeat its bits with debug.deterministic."""
        try:
            with deterministic_algorithms(True):
                return bool(device_class(self.device))
        except RuntimeError:  # torch has no deterministic algorithm for an operation on this device
            return False


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    uses: tuple[Use, ...]
    """Uses of the machine that a problem forbids."""
    seconds: float
    """Expected duration, by which the progress bar moves."""
    run: Callable[[str, Subject], tuple[Finding, Figures]]
    """From the name and the device under test to the finding and its figures. A UserError counts as `not checked`, any
    other exception as a problem."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    finding: Finding
    figures: Figures = {}
    uses: tuple[Use, ...] = ()
    seconds: float = 0.0


def run_check(check: Check, subject: Subject) -> CheckResult:
    began = time.monotonic()
    set_float32_products(subject.device, tf32=False)  # as it is before a run, whatever the check before has left
    figures: Figures = {}
    try:
        finding, figures = check.run(check.name, subject)
    except UserError as error:
        finding = not_checked(check.name, str(error))
    except Exception as error:  # a device that is broken, or lacks an operator, can raise anything
        lines = str(error).strip().splitlines() or [""]
        finding = problem(check.name, f"stopped: {type(error).__name__}: {lines[0]}", REPORT_IT)
    seconds = round(time.monotonic() - began, 2)
    return CheckResult(finding=finding, figures=figures, uses=check.uses, seconds=seconds)
