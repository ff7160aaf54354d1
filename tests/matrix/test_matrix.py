"""One matrix of real runs: every cell is a run of the command line, and equals its twin, the run of one process on the
same device, in every loss, gradient norm, validation loss and saved tensor.

To add a way to train: its name in one of the dictionaries below, and rows in TABLE. Rows of the tier `default` have
every pair of values of two columns, which a test demands; rows of the tier `long` are the rest.
"""

from dataclasses import replace

import pytest

from tests.device.sim import environment
from tests.pairs import pairs_of, rows_of
from tests.programs import events_of, files_of, train_with_hub
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import CheckpointConfig, JobConfig, ValidationConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Step, Validated
from thinpipe.training.trainer import Trainer

TABLE = """
tier     model  device  replicas  placement
default  dense  cpu     alone     one-process
default  keel   sim     alone     one-process
default  dense  sim     alone     pipeline
default  keel   cpu     alone     pipeline
default  dense  cpu     alone     hub
default  keel   sim     alone     hub
long     dense  sim     alone     one-process
long     keel   cpu     alone     one-process
long     dense  cpu     alone     pipeline
long     keel   sim     alone     pipeline
long     dense  sim     alone     hub
long     keel   cpu     alone     hub
"""
STEPS = 6
MODELS = {
    "dense": {"subspace": SubspaceConfig()},
    "keel": {
        "subspace": SubspaceConfig(),
        "projection": ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=2),
    },
}
"""Name -> model settings that differ from those of `run_config`."""
DEVICES = ("cpu", "sim")
REPLICAS = {"alone": {}}
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
AXES = {"model": MODELS, "device": DEVICES, "replicas": REPLICAS, "placement": PLACEMENTS}


def cells():
    """(tier, column -> value) of every row of the table."""
    columns, *lines = (line.split() for line in TABLE.strip().splitlines())
    assert columns == ["tier", *AXES]
    return [(tier, dict(zip(AXES, values, strict=True))) for tier, *values in lines]


def settings_of(run_config, name, model, device, replicas):
    return replace(
        run_config,
        job=JobConfig(dump_folder=run_config.job.dump_folder.with_name(name)),
        model=replace(run_config.model, **MODELS[model]),
        training=replace(run_config.training, steps=STEPS, device=device),
        checkpoint=CheckpointConfig(interval=4),
        validation=ValidationConfig(freq=3, steps=1),
        **REPLICAS[replicas],
    )


def outcome(config):
    """All numbers of a finished run, and hashes of its last checkpoint."""
    steps = [(event.step, event.loss, event.grad_norm) for event in events_of(config, Step)]
    validations = [(event.step, event.loss) for event in events_of(config, Validated)]
    assert (len(steps), len(validations)) == (STEPS, 2)
    return steps, validations, files_of(config, STEPS)


def marked(tier, cell):
    return pytest.param(cell, marks=[pytest.mark.long] if tier == "long" else [], id="-".join(cell.values()))


@pytest.mark.parametrize("cell", [marked(tier, cell) for tier, cell in cells()])
def test_a_run_equals_its_twin(cell, sim, run_config, programs):  # noqa: ARG001
    *settings, placement = cell.values()
    twin, config = (settings_of(run_config, name, *settings) for name in ("twin", "cell"))
    Trainer(twin).train()
    PLACEMENTS[placement](programs, config)
    assert outcome(config) == outcome(twin)


def test_the_default_tier_has_every_pair_and_the_table_every_cell_once():
    default = [cell for tier, cell in cells() if tier == "default"]
    wanted = set().union(*map(pairs_of, rows_of(AXES)))
    assert wanted - set().union(*map(pairs_of, default)) == set()
    assert sorted(tuple(cell.values()) for _, cell in cells()) == sorted(tuple(row.values()) for row in rows_of(AXES))


def test_models_differ(sim, run_config):  # noqa: ARG001
    """Equality of cells is not for want of a difference between the columns."""
    configs = [settings_of(run_config, name, name, "cpu", "alone") for name in MODELS]
    for config in configs:
        Trainer(config).train()
    assert outcome(configs[0])[0] != outcome(configs[1])[0]
