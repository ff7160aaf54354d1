"""End losses and step times of the precision recipes: the keel preset's model, shrunk, and a dense one, three seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.recipes --data TOKENS --work FOLDER --output benchmarks/results/recipes_DATE

Every run sees the same batches. Runs are kept in FOLDER: the same command goes on where it was stopped, and writes
OUTPUT.json and OUTPUT.md after every run. Step times are processor time on one core, of steps of all recipes in turn;
on a CPU without units for bfloat16 they say what the arithmetic of a recipe costs there, not what a GPU gains.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import thinpipe
from benchmarks.command_line import run_benchmark
from benchmarks.provenance import versions
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import ProjectionConfig
from thinpipe.config.precision import Precision
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.core.events import Validated, read_events
from thinpipe.core.files import write_atomically
from thinpipe.core.run_folder import events_path
from thinpipe.data import Tokens
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.training.engine import Engine

RECIPES: tuple[Precision, ...] = ("fp32", "bf16-mixed", "bf16")
SEEDS = (0, 1, 2)
TARGET = 0.005
"""Largest difference of an end loss from that of fp32 with the same seed, as a fraction."""
MODELS: dict[str, dict[str, Any]] = {
    "keel": {
        "model": {
            "boundaries": (1, 2, 3),
            "projection": ProjectionConfig(
                kind="keel", width=14, token_prior_rank=32, token_prior_window=4, embedding_rank=32
            ),
        },
        "boundary": BoundaryConfig(forward="int4", backward="int4"),
    },
    "dense": {"model": {}},
}
"""Name of a model -> settings. keel: the preset `default` at half its width, with half its blocks."""
TIMED_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    data: Path
    """Folder of tokens, as written by `thinpipe tokenize`."""
    work: Path
    """Folder of the runs."""
    output: Path
    """Results without their ending: OUTPUT.json and OUTPUT.md."""
    steps: int = 500
    """Optimiser steps of each run."""
    dim: int = 128
    """Width of the residual stream."""


def config_of(settings: Settings, model: str, recipe: Precision, seed: int) -> RunConfig:
    sections = MODELS[model]
    shape: dict[str, Any] = {
        "dim": settings.dim,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "hidden_dim": 3 * settings.dim,
    }
    return RunConfig(
        job=JobConfig(dump_folder=settings.work / f"{model}-{recipe}-{seed}"),
        data=DataConfig(path=settings.data),
        model=ModelSettings(preset="llama-tiny", max_seq_len=128, **shape, **sections["model"]),
        training=TrainingConfig(steps=settings.steps, global_batch_size=8, seq_len=128, precision=recipe, device="cpu"),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=4),
        optimizer=OptimizerConfig(lr=2e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=max(1, settings.steps // 20)),
        basis=BasisConfig(interval=0),
        boundary=sections.get("boundary", BoundaryConfig()),
        checkpoint=CheckpointConfig(interval=100, keep_latest_k=1),
        validation=ValidationConfig(freq=settings.steps, steps=50),
        debug=DebugConfig(seed=seed),
    )


def end_loss(config: RunConfig) -> float | None:
    """Validation loss after the last step; None if the run has not come there."""
    path = events_path(config.job.dump_folder)
    found = [event for event in read_events(path) if isinstance(event, Validated)] if path.exists() else []
    return next((event.loss for event in found if event.step == config.training.steps), None)


def step_seconds(settings: Settings, model: str) -> dict[str, float]:
    """Median processor time of a step, by recipe."""
    vocabulary = Tokens(settings.data / "train").manifest.vocabulary.size
    engines = {}
    for recipe in RECIPES:
        config = config_of(settings, model, recipe, seed=0)
        engines[recipe] = Engine(config, config.model.resolve(vocabulary))
    seconds: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for index in range(TIMED_STEPS + 1):
        ids_BW = np.random.default_rng(index).integers(vocabulary, size=(8, 129))
        for recipe, engine in engines.items():
            started = time.process_time()
            engine.step(index, ids_BW, lr=1e-4)
            seconds[recipe].append(time.process_time() - started)
    return {recipe: statistics.median(each[1:]) for recipe, each in seconds.items()}  # the first allocates state


def bytes_per_weight(settings: Settings, model: str, recipe: Precision) -> float:
    """Weights, gradients and moments of the whole model."""
    config = config_of(settings, model, recipe, seed=0)
    costs = segment_costs(config.model.resolve(Tokens(settings.data / "train").manifest.vocabulary.size), config)
    nbytes = sum(cost.weights_nbytes + cost.gradients_nbytes + cost.optimiser_nbytes for cost in costs)
    return nbytes / sum(cost.parameters for cost in costs)


def page(record: dict[str, Any]) -> str:
    lines = [
        "# End losses of the precision recipes",
        "",
        f"`{record['command']}`",
        "",
        f"Validation loss after {record['steps']} steps of 1024 tokens, Llama of width {record['dim']} with 4 blocks. "
        "Differences are from fp32 with the same seed. Step: processor seconds on one core, "
        f"{record['versions']['cpu']}. Target: within {TARGET:.1%}.",
        "",
        "| model | recipe | bytes a weight | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | step |",
        "|---|---|---|" + "---|" * len(SEEDS) + "---|---|",
    ]
    for model in MODELS:
        losses = record["losses"].get(model, {})
        exact = losses.get("fp32", {})
        for recipe in RECIPES:
            own, cells, gaps = losses.get(recipe, {}), [], []
            for seed in map(str, SEEDS):
                if recipe == "fp32" or seed not in own or seed not in exact:
                    cells.append(f"{own[seed]:.4f}" if seed in own else "")
                    continue
                gaps.append(own[seed] / exact[seed] - 1)
                cells.append(f"{own[seed]:.4f} ({gaps[-1]:+.2%})")
            mean = f"{statistics.mean(gaps):+.2%}" if gaps else ""
            step, nbytes = record["step_seconds"][model][recipe], record["bytes_per_weight"][model][recipe]
            lines.append(f"| {model} | {recipe} | {nbytes:.2f} | {' | '.join(cells)} | {mean} | {step:.2f} s |")
    return "\n".join([*lines, ""])


def run(settings: Settings) -> None:
    losses: dict[str, dict[str, dict[str, float]]] = {}
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.recipes --data TOKENS --steps {settings.steps} --dim {settings.dim} ...",
        "steps": settings.steps,
        "dim": settings.dim,
        "versions": versions(),
        "losses": losses,
        "step_seconds": {model: step_seconds(settings, model) for model in MODELS},
        "bytes_per_weight": {
            model: {recipe: bytes_per_weight(settings, model, recipe) for recipe in RECIPES} for model in MODELS
        },
    }
    for seed in SEEDS:
        for model in MODELS:
            for recipe in RECIPES:
                config = config_of(settings, model, recipe, seed)
                if end_loss(config) is None and thinpipe.train(config, quiet=True).stop_reason != "finished":
                    return
                loss = end_loss(config)
                assert loss is not None
                losses.setdefault(model, {}).setdefault(recipe, {})[str(seed)] = loss
                for ending, text in ((".json", json.dumps(record, indent=1) + "\n"), (".md", page(record))):
                    write_atomically(settings.output.with_name(settings.output.name + ending), text.encode())


if __name__ == "__main__":
    sys.exit(run_benchmark("recipes", Settings, run))
