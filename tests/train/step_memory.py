"""Peak memory of two training steps of whole models, in a process that does nothing else. Linux only.

On the CPU it is the resident set, on the device `sim` what its allocator has given out.

`python -m tests.train.step_memory '<JSON>'` prints bytes for every list of settings; `read_peaks` starts it. Like
`benchmarks.step.peak_memory`, but with the engine of a run: every family, micro-batches, inner boundaries.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.step.peak_memory import RETURN_BLOCKS_AT_ONCE
from tests.device.sim import environment as environment_of_sim
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.peak_memory import peak_resident_nbytes
from thinpipe.training.engine import Engine

VOCABULARY = 8192


def run_config(sections):
    return from_table({"lr_scheduler": {"warmup_steps": 1}, **sections}, RunConfig, where="test")


def read_peaks(cases, *, on_sim=False):
    """Of each, in bytes beside what the process had before."""
    command = [sys.executable, "-m", "tests.train.step_memory", json.dumps(cases)]
    environment = {**os.environ, **RETURN_BLOCKS_AT_ONCE, **(environment_of_sim() if on_sim else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def run_steps(config, vocabulary):
    engine = Engine(config, config.model.resolve(vocabulary))
    shape = (config.training.global_batch_size, config.training.seq_len + 1)
    for index in range(2):  # the first allocates the optimiser's state
        ids = np.random.default_rng(index).integers(vocabulary, size=shape)
        assert engine.step(index, ids, 1e-4).fault is None


def load_libraries():
    """On first use they take a hundred megabytes."""
    for preset in ("llama-tiny", "gpt2-tiny"):
        for subspace in ({}, {"width": 8, "free_last": False}):
            for precision, execution in (
                ("fp32", {}),
                ("bf16-mixed", {}),
                ("fp32", {"checkpoint_activations": "block"}),
            ):
                model = {"preset": preset, "n_layers": 1, "subspace": subspace}
                training = {"global_batch_size": 1, "seq_len": 16, "precision": precision}
                run_steps(run_config({"model": model, "training": training, "execution": execution}), 64)


def resident_peak(config):
    gc.collect()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident set so far
    run_steps(config, VOCABULARY)
    return peak_resident_nbytes() - before


def allocated_peak(config):
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    run_steps(config, VOCABULARY)
    return torch.accelerator.max_memory_allocated() - before


def main():
    cases = [run_config(sections) for sections in json.loads(sys.argv[1])]
    if any(config.training.device == "cpu" for config in cases):
        load_libraries()
    peaks = [resident_peak(config) if config.training.device == "cpu" else allocated_peak(config) for config in cases]
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
