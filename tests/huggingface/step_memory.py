"""Peak memory of two training steps on a Hugging Face model, by kind as tests/train/step_memory.py measures it: in one
process, or of each of several.

`python -m tests.huggingface.step_memory '<JSON>'` prints for every list of settings the bytes while the base is loaded,
and those of the steps; `read_peaks` starts it.
"""

import gc
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch

from benchmarks.step.peak_memory import RETURN_BLOCKS_AT_ONCE
from tests.device.sim import environment as environment_of_sim
from tests.huggingface.models import save_model, small_config
from tests.train.step_memory import run_config
from tests.transport.processes import cold_process, results, start
from thinpipe.config.link import LinkConfig
from thinpipe.core.peak_memory import peak_resident_nbytes
from thinpipe.models.hf.model_of_run import model_of_run
from thinpipe.training.engine import Engine
from thinpipe.transport.gloo_group import open_group


def read_peaks(cases, *, processes=1, on_sim=False):
    """Of each case, what each process has needed beside what it had before: [bytes while loading, of the steps]."""
    environment = {**os.environ, **RETURN_BLOCKS_AT_ONCE, **(environment_of_sim() if on_sim else {})}
    workers = start(
        processes, "tests.huggingface.step_memory", json.dumps(cases), process=cold_process, env=environment
    )
    return [*zip(*results(workers, seconds=1200), strict=True)]


def base_config(width, layers, vocabulary):
    """config.json of a Qwen 3 with an MLP of three times its width."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128, "head_dim": 64}
    return small_config(
        "qwen3", **sizes, **heads, vocab_size=vocabulary, tie_word_embeddings=False, layer_types=None, dtype="bfloat16"
    )


def make_base(folder, **sizes):
    """A base in bfloat16, as models are published."""
    if not (folder / "config.json").exists():
        save_model(base_config(**sizes), folder, shard="100MB", dtype=torch.bfloat16)
    return folder


class Peaks:
    def __init__(self, device):
        self.on_cpu = device == "cpu"
        gc.collect()
        self.before = psutil.Process().memory_info().rss if self.on_cpu else torch.accelerator.memory_allocated()
        self.forget()

    def forget(self):
        if self.on_cpu:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident set so far
        else:
            torch.accelerator.reset_peak_memory_stats()

    def read(self):
        return (peak_resident_nbytes() if self.on_cpu else torch.accelerator.max_memory_allocated()) - self.before


def measure(config, group):
    peaks = Peaks(config.training.device)
    model = model_of_run(config)
    engine = Engine(config, model, group)
    loading = peaks.read()
    gc.collect()
    peaks.forget()
    shape = (config.training.global_batch_size, config.training.seq_len + 1)
    for index in range(2):  # the first allocates the optimiser's state
        ids = np.random.default_rng(index).integers(model.vocab_size, size=shape)
        assert engine.step(index, ids, 1e-4).fault is None
    return [loading, peaks.read()]


def small_runs(configs, base):
    """One of each kind, on a small base."""
    kinds = {(c.lora is None, c.model.quantize_base, c.training.precision): c for c in configs}
    for config in kinds.values():
        model = replace(config.model, hf=str(base), boundaries=(1,))
        yield replace(config, model=model, training=replace(config.training, seq_len=32))


def main():
    configs = [run_config(sections) for sections in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    count = int(os.environ["WORLD_SIZE"])
    with TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base", width=128, layers=2, vocabulary=512)
        group = open_group(LinkConfig(), timeout=timedelta(seconds=600)) if count > 1 else None
        for config in small_runs(configs, base):  # libraries take a hundred megabytes on first use
            measure(config, group)
    print(json.dumps([measure(config, group) for config in configs]))


if __name__ == "__main__":
    main()
