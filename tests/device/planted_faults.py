"""A copy of the package with one fault planted in it, and `thinpipe selftest` on the device `sim` with that copy.

`python -m tests.device.planted_faults NAMES ARGUMENTS...` runs the self-test with these arguments and only the checks
of these names (separated by commas; all if there are none).
"""

import os
import shutil
import subprocess
import sys

import torch  # noqa: F401  loads the device, and must do so before its module is imported

from tests.device.mutations import PACKAGE, ROOT, Mutation
from tests.device.sim import environment

MATMUL_OFF = """
_faulty = torch.library.Library("aten", "IMPL")
_faulty.impl("mm", lambda a, b: ((a.cpu() @ b.cpu()) * (1 + 2.0**-12)).to(a.device), "PrivateUse1")
"""
"""Text for the end of `device/choice.py`: matrix products of the device are too large by 0.02 %."""
LAW_OFF = """
_right = memory_nbytes


def memory_nbytes(*arguments, **settings):
    return int(_right(*arguments, **settings) * 0.7)
"""
"""Text for the end of `planning/segment_costs.py`: the memory law is off by 30 %."""


def plant(folder, fault: Mutation | tuple[str, str]):
    """Copies the package into `folder`. `fault`: a statement to delete, or a module and the text for its end."""
    package = folder / "thinpipe"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    if isinstance(fault, Mutation):
        fault.delete_in(package)
    else:
        module, text = fault
        with (package / module).open("a", encoding="utf-8") as file:
            file.write(text)


def run_selftest(folder, *checks: str, **settings):
    """`thinpipe selftest --quick` with the package in `folder`; `settings` of the device, as `SIM_RACES=0`."""
    variables = os.environ | environment(**settings) | {"COLUMNS": "400"}
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
    arguments = ["--device", "sim", "--quick", "--output", str(folder / "report")]
    command = [sys.executable, "-m", "tests.device.planted_faults", ",".join(checks), *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=800)


def main():
    from thinpipe.cli import main as run_command
    from thinpipe.selftest import command

    wanted, every = sys.argv[1].split(","), command.checks
    if sys.argv[1]:
        command.checks = lambda seconds: [check for check in every(seconds) if check.name in wanted]
    return run_command(["selftest", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
