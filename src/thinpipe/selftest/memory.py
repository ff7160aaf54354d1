"""Peak memory of training steps at three sizes, against what the cost model predicts (`planning/segment_costs.py`).

On an accelerator the peak is what torch's allocator has handed out. On a CPU it is the highest resident set above that
before the model was built, in a process of its own: `python -m thinpipe.selftest.memory DEVICE RECIPE SIZE ...`.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec
import psutil  # type: ignore[import-untyped]
import torch

from thinpipe.config.run import RunConfig
from thinpipe.device.choice import choose_device
from thinpipe.device.host_copies import has_pinned_memory
from thinpipe.device.memory import MemoryPeak, forget_memory_peak, free_nbytes, memory_peak
from thinpipe.doctor.finding import Finding, ok, problem, warning
from thinpipe.planning.segment_costs import memory_nbytes, segment_costs, shared_nbytes
from thinpipe.selftest.check import RECIPE_NAMES, Figures, RecipeName, Subject
from thinpipe.selftest.workload import Size, language, run_config
from thinpipe.training.engine import Engine
from thinpipe.training.memory_check import kernel_of

SIZES: dict[str, Size] = {
    "activations": Size(dim=256, layers=4, batch=2, microbatch=1, tokens=640, vocabulary=8192),
    "one micro-batch": Size(dim=384, layers=4, batch=2, microbatch=2, tokens=256, vocabulary=8192),
    "weights": Size(dim=640, layers=3, batch=2, microbatch=1, tokens=128, vocabulary=8192),
}
"""Models of 140 to 460 MB by what takes most of the memory, ascending: some systems cannot forget a peak. Activations
calibrate the cost model, with more tokens than `MAX_FLOAT32_ATTENTION_TOKENS`: up to those the model counts float32
attention, as on a CPU, and a card that needs less would seem to need less for long texts too."""
_QUICK_SIZES = ("activations", "weights")
MEMORY_BAND = 0.15
"""Largest relative difference of prediction and measurement. Tensors are counted to the byte; allocators round up."""
LAW_IS_OFF = "Do not rely on the memory that `plan`, `train` and hubs predict; report it with the file below."
_RETURN_BLOCKS_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc give freed tensors back to the system. By default it keeps blocks of up to 32 MB, in a heap whose holes
depend on the history of the process."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one process."""

    overhead_nbytes: int | None
    """Bytes beside tensors: of the process on a CPU, of its context on an accelerator. None: not measured."""
    peaks: dict[str, MemoryPeak]
    """By the name of the size."""


def predicted_nbytes(config: RunConfig, vocabulary: int) -> tuple[int, int]:
    """Peak bytes of a step by the cost model, and the part of activations and temporary tensors in it."""
    model = config.model.resolve(vocabulary)
    [cost] = segment_costs(model, config, kernel_of(config, model, choose_device(config.training.device)))
    whole = memory_nbytes(cost, config, 1) + shared_nbytes(model, config)
    return whole, cost.activation_nbytes + cost.peak_extra_nbytes


def check_memory(what: str, subject: Subject) -> tuple[Finding, Figures]:
    recipe = next(name for name in RECIPE_NAMES if name == subject.recipe("auto").name)
    sizes = {name: SIZES[name] for name in (_QUICK_SIZES if subject.quick else SIZES)}
    measured = _in_other_process(subject, recipe, sizes) if subject.is_cpu else measure(subject.device, recipe, sizes)
    ratios: Figures = {}
    for name, size in sizes.items():
        predicted, activations = predicted_nbytes(run_config(size, subject.device, recipe), size.vocabulary)
        peak = measured.peaks[name]
        ratios[name] = round(predicted / peak.allocated_nbytes, 4)
        if name == "activations":
            factor = (peak.allocated_nbytes - (predicted - activations)) / activations
            subject.calibrate(activation_factor=factor if factor > 0 else None)
    if not subject.quick and not subject.is_cpu:
        measured = _in_other_process(subject, recipe, {})
    subject.calibrate(overhead_nbytes=measured.overhead_nbytes)
    listed = ", ".join(f"{float(ratio):.2f} ({name})" for name, ratio in ratios.items())
    text = f"predicted / measured peak of {recipe} steps: {listed}"
    if all(abs(float(ratio) - 1) <= MEMORY_BAND for ratio in ratios.values()):
        return ok(what, text), ratios
    text = f"the memory law is off: {text} (allowed: {1 - MEMORY_BAND:.2f} to {1 + MEMORY_BAND:.2f})"
    if subject.is_cpu and sys.platform != "linux":  # where a process cannot tell its peak exactly
        return warning(what, text, LAW_IS_OFF), ratios
    return problem(what, text, LAW_IS_OFF), ratios


def measure(device: torch.device, recipe: RecipeName, sizes: Mapping[str, Size]) -> Measured:
    """Two steps of each size: the first allocates moments. A toy step comes before all, because it loads libraries."""
    _steps(run_config(Size(dim=64, layers=1, batch=1, microbatch=1, tokens=16), device, recipe), 64)
    gc.collect()
    overhead, peaks = psutil.Process().memory_info().rss if device.type == "cpu" else None, {}
    for name, size in sizes.items():
        before = forget_memory_peak(device)
        _steps(run_config(size, device, recipe), size.vocabulary)
        peaks[name] = memory_peak(device, before)
    return Measured(overhead_nbytes=overhead, peaks=peaks)


def _steps(config: RunConfig, vocabulary: int) -> None:
    engine = Engine(config, config.model.resolve(vocabulary))
    for step in range(2):
        ids = language(step, config.training.global_batch_size, config.training.seq_len, vocabulary)
        engine.step(step, ids, 1e-4)


def _in_other_process(subject: Subject, recipe: RecipeName, sizes: Mapping[str, Size]) -> Measured:
    """Measurements of a process that does nothing else. The memory that the process takes on an accelerator with memory
    of its own is what the accelerator has less of while the process lives. Raises RuntimeError if the process fails."""
    command = [sys.executable, "-m", "thinpipe.selftest.memory", str(subject.device), recipe, *sizes]
    environment, errors = {**os.environ, **_RETURN_BLOCKS_AT_ONCE}, subject.folder / "memory.log"
    has_own_memory = has_pinned_memory(subject.device)
    free = free_nbytes(subject.device) if has_own_memory else 0
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        assert process.stdout is not None
        printed = process.stdout.readline()
        taken = free - free_nbytes(subject.device) if has_own_memory else 0
    if process.returncode:
        lines = errors.read_text("utf-8", errors="replace").strip().splitlines()
        raise RuntimeError((lines or [f"exit code {process.returncode}"])[-1])
    measured = msgspec.json.decode(printed, type=Measured)
    return msgspec.structs.replace(measured, overhead_nbytes=taken) if taken > 0 else measured


def main(device: str, recipe: str, *names: str) -> None:
    """Prints measurements as JSON, and waits until standard input is closed."""
    (known,) = (name for name in RECIPE_NAMES if name == recipe)
    measured = measure(choose_device(device), known, {name: SIZES[name] for name in names})
    print(msgspec.json.encode(measured).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
