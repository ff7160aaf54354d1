"""Peak memory of two training steps, measured in a fresh process, so that nothing that ran before can be seen in it.

`read_memory(job)` starts `python -m benchmarks.step.peak_memory <job as JSON>` and reads the one JSON line that it
prints. On CPU the peak is the process's highest resident set minus the resident set before the model is built; on CUDA
it is what the allocator handed out. A toy step runs before either, because libraries load a hundred megabytes on first
use.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.step.training_step import TrainingStep, set_threads
from benchmarks.step.variants import Variant
from thinpipe.core.peak_memory import peak_resident_nbytes

TIMEOUT_SECONDS = 3600.0
RETURN_BLOCKS_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc give freed tensors back to the system. By default it keeps blocks of up to 32 MB on a heap whose holes
depend on the history of the process: peaks are then 13-20 % larger and differ by up to 3 % from run to run."""


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """What one process measures."""

    variant: Variant
    batch: int
    seq: int
    device: str
    bf16: bool
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """What it found."""

    peak_nbytes: int
    activation_nbytes: int
    """What the forward pass leaves behind for the backward pass, the logits included."""
    optimizer_nbytes: int
    """The optimiser's state, counted tensor by tensor."""


def read_memory(job: MemoryJob) -> MemoryReading:
    """Runs the job in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step.peak_memory", json.dumps(asdict(job))]
    environment = {**os.environ, **RETURN_BLOCKS_AT_ONCE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"measuring the memory of {job.variant.name} at {job.batch} x {job.seq} tokens failed with exit code "
            f"{done.returncode} (below 0: a signal; -9 often means that memory ran out):\n{done.stderr[-2000:]}"
        )
    return MemoryReading(**json.loads(done.stdout))


def measure(job: MemoryJob) -> MemoryReading:
    """Runs the steps here and now: right only in a process that has done nothing else."""
    set_threads(job.threads)
    _load_libraries(job)
    before_nbytes = _held_nbytes(job.device)
    step = TrainingStep(job.variant, device=job.device, bf16=job.bf16)
    step.set_batch(job.batch, job.seq)
    step.run()  # allocates the optimiser's state: only the second step has it and the activations at the same time
    before_forward_nbytes = _held_nbytes(job.device)
    loss = step.forward()
    activation_nbytes = _held_nbytes(job.device) - before_forward_nbytes
    step.finish(loss)
    peak_nbytes = torch.cuda.max_memory_allocated() if job.device == "cuda" else peak_resident_nbytes()
    return MemoryReading(
        peak_nbytes=peak_nbytes - before_nbytes,
        activation_nbytes=activation_nbytes,
        optimizer_nbytes=step.optimizer_nbytes,
    )


def _load_libraries(job: MemoryJob) -> None:
    toy = Variant(dim=64, layers=1, vocab=64, max_seq_len=16, hidden_dim=64)
    for variant in (toy, replace(toy, width=8)):
        step = TrainingStep(variant, device=job.device, bf16=job.bf16)
        step.set_batch(2, 16)
        step.run()


def _held_nbytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else int(psutil.Process().memory_info().rss)


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = MemoryJob(**{**fields, "variant": Variant(**fields["variant"])})
    print(json.dumps(asdict(measure(job))))


if __name__ == "__main__":
    main()
