"""One matrix of real runs: every cell is a run of the command line, and equals its twin, the run of one process on the
same device, in every loss, gradient norm, validation loss and saved tensor.

To add a way to train: its name in one of the dictionaries below. The default tier has every pair of values of two axes,
in as few cells as were found; all other cells are the tier `long`.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest

from tests.device.sim import environment
from tests.huggingface.models import save_model, small_config
from tests.pairs import cover, rows_of
from tests.programs import events_of, files_of, train_with_hub
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.rounds import RoundsConfig
from thinpipe.config.run import CheckpointConfig, JobConfig, ModelSettings, ValidationConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Step, Validated
from thinpipe.training.trainer import Trainer

STEPS = 6


def preset(config, **changes):
    """With matrices large enough for 8-bit moments."""
    return {"model": replace(config.model, hidden_dim=160, subspace=SubspaceConfig(), **changes)}


def adapted(config):
    """Adapters on a Hugging Face model."""
    base = config.job.dump_folder.with_name("base")
    if not base.exists():
        save_model(small_config("llama", vocab_size=64, num_hidden_layers=4), base)
    model = ModelSettings(hf=str(base), boundaries=config.model.boundaries)
    return {"model": model, "lora": LoraConfig(r=4, lora_dropout=0.1)}


MODELS = {
    "dense": preset,
    "keel": partial(preset, projection=ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=2)),
    "LoRA": adapted,
}
"""Name -> sections of the settings that define the model, from those of `run_config`."""
DEVICES = ("cpu", "sim")
MEMORY = {
    "fp32": ({}, ExecutionConfig()),
    "mixed-offloaded": ({"precision": "bf16-mixed", "offload": "optimizer"}, ExecutionConfig()),
    "bf16-checkpointed": ({"precision": "bf16"}, ExecutionConfig(checkpoint_activations="block")),
}
"""Name -> training and execution settings that decide how much memory a run takes."""
REPLICAS = {"alone": {}, "rounds": {"rounds": RoundsConfig(steps=2, replicas=2)}}
"""Name -> sections of the settings: how many copies of the pipeline there are, and what they exchange."""


def train(programs, config, degree):
    """`thinpipe train` in so many processes."""
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_degree=degree))
    file = config.job.dump_folder.with_suffix(".toml")
    file.write_text(dump_toml(config))
    program = programs("train", "train", file, environment=environment())
    assert program.finish() == 0, program.printed


PLACEMENTS = {
    "one-process": lambda programs, config: train(programs, config, 1),
    "pipeline": lambda programs, config: train(programs, config, 2),
    "hub": lambda programs, config: train_with_hub(programs, config, [config.training.device] * 2, environment()),
}
"""Name -> programs that compute a run to its end."""
AXES = {"model": MODELS, "device": DEVICES, "memory": MEMORY, "replicas": REPLICAS, "placement": PLACEMENTS}


def settings_of(run_config, name, model, device, memory, replicas):
    training, execution = MEMORY[memory]
    return replace(
        run_config,
        job=JobConfig(dump_folder=run_config.job.dump_folder.with_name(name)),
        training=replace(run_config.training, steps=STEPS, device=device, **training),
        execution=execution,
        checkpoint=CheckpointConfig(interval=4),
        validation=ValidationConfig(freq=3, steps=1),
        **MODELS[model](run_config),
        **REPLICAS[replicas],
    )


def outcome(config):
    """All numbers of a finished run, and hashes of its last checkpoint."""
    steps = [(event.step, event.loss, event.grad_norm) for event in events_of(config, Step)]
    validations = [(event.step, event.loss) for event in events_of(config, Validated)]
    assert (len(steps), len(validations)) == (STEPS, 2)
    return steps, validations, files_of(config, STEPS)


def is_possible(replicas, memory, placement, **_others):
    """Rounds merge weights in float32, and a hub has none yet."""
    return replicas != "rounds" or (memory != "bf16-checkpointed" and placement != "hub")


def cells():
    rows = rows_of(AXES, is_possible)
    default = cover(rows)
    marks = [[] if cell in default else [pytest.mark.long] for cell in rows]
    names = ["-".join(cell.values()) for cell in rows]
    return [pytest.param(cell, marks=mark, id=name) for cell, mark, name in zip(rows, marks, names, strict=True)]


@pytest.mark.parametrize("cell", cells())
def test_a_run_equals_its_twin(cell, sim, run_config, programs):  # noqa: ARG001
    *settings, placement = cell.values()
    twin, config = (settings_of(run_config, name, *settings) for name in ("twin", "cell"))
    Trainer(twin).train()
    PLACEMENTS[placement](programs, config)
    assert outcome(config) == outcome(twin)


@pytest.mark.parametrize("axis", ["model", "memory", "replicas"])
def test_values_differ(axis, run_config):
    """Equality of cells is not for want of a difference between the columns."""
    outcomes = []
    for value in AXES[axis]:
        cell = {"model": "dense", "device": "cpu", "memory": "fp32", "replicas": "alone"} | {axis: value}
        config = settings_of(run_config, value, **cell)
        Trainer(config).train()
        outcomes.append(outcome(config)[0])
    assert all(a != b for a, b in combinations(outcomes, 2))
