"""Seconds from the start of `thinpipe train` to the line of its first step, with a base of more than a gigabyte:
python -m benchmarks.first_step --output DIR --date DATE.

LoRA in bfloat16 on a Qwen 3 with random weights, in one process and in two, first on a machine that has not probed the
model yet, then on one that has. The base was just written, so its files are in the system's cache. Beside the clock's
seconds those of all processors are written, which another program on the machine does not change; what takes them is
measured in a process of its own, part after part.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.provenance import versions
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import ModelSettings, RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.files import write_atomically

WIDTH, LAYERS, VOCABULARY = 2048, 12, 4096
STEPS, TOKENS = 2, 32
FIRST_STEP = "step:      1"


def make_runs(folder: Path) -> dict[int, Path]:
    """A base, tokens, and a run file for one process and for two."""
    from tests.huggingface.run_files import run_of, words
    from tests.huggingface.step_memory import make_base
    from thinpipe.config.data import TokenizeConfig
    from thinpipe.data import Tokenizer, prepare

    base = make_base(folder / "base", width=WIDTH, layers=LAYERS, vocabulary=VOCABULARY)
    Tokenizer.train(words(50), vocab_size=300).save(base)
    (folder / "train.txt").write_text("\n".join(words(400)))
    prepare(TokenizeConfig(sources=(str(folder / "train.txt"),), output=folder / "tokens", tokenizer=base))
    files = {}
    for processes in (1, 2):
        run = run_of(base, folder / "tokens", folder / str(processes), "LoRA", degree=processes, cuts=(LAYERS // 2,))
        training = replace(run.training, steps=STEPS, global_batch_size=2, seq_len=TOKENS, precision="bf16")
        parallelism = replace(run.parallelism, pipeline_parallel_microbatch_size=1)
        run = replace(run, training=training, parallelism=parallelism, lora=LoraConfig(r=16))
        files[processes] = folder / f"{processes}.toml"
        files[processes].write_text(dump_toml(run))
    return files


def time_run(file: Path, state: Path) -> dict[str, float]:
    """Starts a run, and stops it at its first step: seconds of the clock, and of processors."""
    config = load_toml(file, RunConfig)
    dump = replace(config.job, dump_folder=config.job.dump_folder / f"{time.time_ns()}")
    again = file.with_name(f"{time.time_ns()}.toml")
    again.write_text(dump_toml(replace(config, job=dump)))
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    command = [sys.executable, "-m", "thinpipe", "train", str(again), "--metrics.log-freq", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        printed = list[str]()
        for line in run.stdout:
            printed.append(line)
            if line.startswith(FIRST_STEP):
                clock, processors = time.monotonic() - started, _processor_seconds(run.pid)
                run.terminate()
                break
        else:
            raise RuntimeError(f"no first step:\n{''.join(printed)[-2000:]}")
        run.stdout.read()
    return {"seconds": clock, "processor_seconds": processors}


def _processor_seconds(pid: int) -> float:
    root = psutil.Process(pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def measure_parts(file: Path) -> dict[str, float]:
    """Processor seconds of each part of the start of one process, by the same functions as `thinpipe train` calls."""
    parts = {"Python and importing torch": time.process_time()}

    @contextmanager
    def part(name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        before = clock()
        yield
        parts[name] = parts.get(name, 0.0) + clock() - before

    config = load_toml(file, RunConfig)
    with part("importing transformers, peft and thinpipe"):
        import numpy as np

        from thinpipe.models.hf import base_statement, base_tensors, lora  # noqa: F401  as a run imports them
        from thinpipe.models.hf.model_of_run import model_of_run
        from thinpipe.models.hf.pretrained_config import read_model
        from thinpipe.models.hf.probe import probe
        from thinpipe.training.engine import Engine

        read_model(_source(config.model))
    model = model_of_run(config)
    with part("probing the model, once on a machine"):
        result = probe(model.stored)
    assert result.refusal is None
    hashed = base_statement.content_sha256

    def timed(tensor: torch.Tensor) -> str:  # in threads of the loader
        with part("hashing the base", time.thread_time):
            return hashed(tensor)

    base_tensors.__dict__["content_sha256"] = timed
    whole = replace(model, boundaries=())  # not cut, so not probed again
    with part("building and loading"):
        engine = Engine(replace(config, model=replace(config.model, boundaries=None)), whole)
    parts["building and loading"] -= parts["hashing the base"]
    ids = np.zeros((config.training.global_batch_size, config.training.seq_len + 1), np.int64)
    with part("the first step"):
        engine.step(0, ids, 1e-4)
    return parts


def _source(model: ModelSettings) -> str:
    assert model.hf is not None
    return model.hf


def write_page(found: dict[str, Any]) -> str:
    parts = found["parts"]
    lines = [
        "# From `thinpipe train` to the first step, on a base of a gigabyte",
        "",
        "`python -m benchmarks.first_step --output benchmarks/results --date DATE`: LoRA of rank 16 in bf16 on a",
        f"Qwen 3 of random weights, width {WIDTH}, {LAYERS} blocks, {found['base_nbytes'] / 1e9:.2f} GB in "
        f"{found['files']} files in the system's cache;",
        f"one thread a process, steps of 2 x {TOKENS} tokens. {found['load']:.1f} programs wanted to run at a time on "
        f"{os.cpu_count()} cores, so seconds of the clock",
        "are too many here: those of processors are the figure to go by. "
        f"{', '.join(f'{name} {value}' for name, value in versions().items())}.",
        "",
        "| processes | probed before | seconds | seconds of processors |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {run['processes']} | {'yes' if run['probed'] else 'no'} | {run['seconds']:.0f} | "
        f"{run['processor_seconds']:.1f} |"
        for run in found["runs"]
    ]
    lines += ["", "What takes them, in one process:", "", "| part | seconds of processors |", "|---|---|"]
    lines += [f"| {name} | {seconds:.1f} |" for name, seconds in parts.items()]
    rate = found["base_nbytes"] / parts["hashing the base"] / 1e9
    lines += [
        "",
        "Each process reads and hashes the tensors of its own layers once, in threads of the loader:",
        f"{rate:.1f} GB a second and thread here, on a processor that others use too. Of the rest, imports are the",
        "most, and do not grow with the base; the first step is computed on a processor without units for bfloat16.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the page and its readings")
    parser.add_argument("--date", required=True, help="for the names of both files, as 2026-11-19")
    parser.add_argument("--parts", type=Path, help="measure the parts of this run file alone, and print them")
    options = parser.parse_args()
    if options.parts is not None:
        print(json.dumps(measure_parts(options.parts)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_runs(folder)
        shards = [*(folder / "base").glob("*.safetensors")]
        found: dict[str, Any] = {"base_nbytes": sum(path.stat().st_size for path in shards), "files": len(shards)}
        runs = []
        for processes, file in files.items():
            for probed in (False, True):
                run = time_run(file, folder / f"state-{processes}")
                runs.append({"processes": processes, "probed": probed, **run})
                print(runs[-1], flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks.first_step",
            "--output",
            name,
            "--date",
            "",
            "--parts",
            str(files[1]),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found |= {"runs": runs, "parts": json.loads(done.stdout.splitlines()[-1]), "load": psutil.getloadavg()[0]}
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"first_step_{options.date}"
    write_atomically(stem.with_suffix(".json"), json.dumps(found, indent=1).encode())
    write_atomically(stem.with_suffix(".md"), write_page(found).encode())


if __name__ == "__main__":
    main()
