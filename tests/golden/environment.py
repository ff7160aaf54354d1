"""The environment of the golden cases: the same arithmetic on every x86-64 Linux, whatever the caller has set.

torch, MKL, oneDNN and the C library choose their kernels by what the processor can do, and kernels for other
instructions round differently. Here all are told to use those that every x86-64 processor has, on one thread.
"""

import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import thinpipe

ROOT = Path(__file__).parents[2]
_WITHOUT = "-AVX2,-FMA,-FMA4,-AVX512F,-AVX2_Usable,-FMA_Usable,-FMA4_Usable,-AVX512F_Usable"
"""Names of glibc 2.33 and later, then those of older ones; what it does not know is passed over."""
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={_WITHOUT}",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
}
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
"""Of the caller's variables, those that say where programs and files are."""
PATIENCE = 600
"""Seconds, for what never comes."""


def pinned_environment(**more: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    found = os.pathsep.join((str(Path(thinpipe.__file__).parents[1]), str(ROOT)))
    return {**passed, **PINNED, "PYTHONPATH": found, **more}


def run_module(module: str, *arguments: object, folder: Path) -> str:
    """What a module prints, run in the pinned environment and in this folder; raises with all of it when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=folder,
        env=pinned_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def machine_facts() -> dict[str, str]:
    """What the digests were recorded with, or are compared on."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": version("torch"),
        "c_library": " ".join(platform.libc_ver()),
    }


@cache
def arithmetic() -> dict[str, str]:
    """Digests of what torch itself computes here, in the pinned environment; see `tests/golden/arithmetic.py`."""
    return json.loads(run_module("tests.golden.arithmetic", folder=ROOT))


def why_undecidable(recorded: dict) -> str:
    """Why this machine cannot say whether the digests still hold; empty if it can. Nothing here depends on thinpipe."""
    there, here = recorded["recorded_with"], machine_facts()
    for fact in ("platform", "torch"):
        if there[fact] != here[fact]:
            return f"cannot decide: the digests were recorded with {fact} {there[fact]}, and this is {here[fact]}"
    differing = [name for name, sha256 in recorded["arithmetic"].items() if arithmetic().get(name) != sha256]
    if differing:
        return (
            f"cannot decide: on this machine torch rounds otherwise in {', '.join(differing)}; the digests were "
            f"recorded with {there['c_library']}, and this is {here['c_library']}"
        )
    return ""
