"""Settings that save memory and change no number: the same run bit for bit, in one process and in several."""

from dataclasses import replace

import pytest

from tests.programs import files_of, steps_of
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.run import JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.training.trainer import Trainer


def named(config, name, **changes):
    return replace(config, job=JobConfig(dump_folder=config.job.dump_folder.with_name(name)), **changes)


def train(programs, config, degree, schedule):
    """`thinpipe train` in so many processes."""
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=degree,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=2,
    )
    file = config.job.dump_folder.with_suffix(".toml")
    file.write_text(dump_toml(replace(config, parallelism=parallelism)))
    program = programs("train", "train", file)
    assert program.finish() == 0, program.printed


def outcome(config):
    return [(event.loss, event.grad_norm) for event in steps_of(config)], files_of(config, config.training.steps)


@pytest.mark.parametrize(
    ("checkpointing", "schedule"),
    [
        ("block", "ZBVZeroBubble"),
        ("segment", "1F1B"),
        pytest.param("block", "1F1B", marks=pytest.mark.long),
        pytest.param("segment", "ZBVZeroBubble", marks=pytest.mark.long),
    ],
)
def test_activation_checkpointing_changes_no_bit_of_a_run(checkpointing, schedule, run_config, programs):
    """With a basis tracker, which observes gradients, and in ZBV with its backward pass in two parts."""
    config = replace(run_config, model=replace(run_config.model, boundaries=(1, 2, 3)))
    micro = replace(config.parallelism, pipeline_parallel_microbatch_size=2)
    execution = ExecutionConfig(checkpoint_activations=checkpointing)
    twin = named(config, "twin", parallelism=micro)
    alone, two = (named(config, name, parallelism=micro, execution=execution) for name in ("alone", "two"))
    Trainer(twin).train()
    Trainer(alone).train()
    train(programs, two, 2, schedule)
    assert len(outcome(twin)[0]) == 12
    assert outcome(alone) == outcome(twin)
    assert outcome(two) == outcome(twin)
