"""Bad values in messages: the sender is named, the step is computed again, and the run ends with the bits of another
in which nothing happened."""

import json
import os
import random
import subprocess
from dataclasses import replace

import pytest

from benchmarks.chaos.poison import poison
from tests.pipeline.cases import CASES, TOKENS, VOCABULARY, batch_size, config_of, digest
from tests.programs import files_of
from tests.reference.language import SyntheticLanguage
from tests.train.poisoning import planned
from tests.train.test_codec_state import few_samples  # noqa: F401  a fixture
from tests.train.test_processes import ENVIRONMENT, finish, placed
from tests.train.test_trainer import events, in_folder
from tests.transport.processes import free_port, group_environment
from tests.warm import WarmProcess
from thinpipe.checkpoint import codec_states
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.run import CheckpointConfig, ParallelismConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Retried, Skipped, Step
from thinpipe.training.engine import Engine
from thinpipe.training.faults import PoisonedError
from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer

NAMED = {case.name: case for case in CASES}
METHODS = {
    "plain": BoundaryConfig(),
    "int4": BoundaryConfig(forward="int4", backward="int4"),
    "ef21": BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.3, feedback="ef21"),
        gradients=CompressionConfig(kind="quantise", bits=4, feedback="ef"),
    ),
    "aqsgd": BoundaryConfig(states=CompressionConfig(kind="quantise", bits=2, feedback="aqsgd")),
    "mask": BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.3, feedback="ef"),
        gradients=CompressionConfig(kind="topk", reuse_mask=True),
    ),
    "lowrank": BoundaryConfig(
        states=CompressionConfig(kind="lowrank", rank=2), gradients=CompressionConfig(kind="lowrank", rank=2)
    ),
}


@pytest.fixture
def poisoned():
    """Poisons this process by a plan, until the test ends."""
    undo = []
    yield lambda plan: undo.append(poison(planned(plan)))
    for each in undo:
        each()


PLAN = [
    [1, 0, True, 1, "nan"],
    [2, 1, False, 1, "nan"],
    [3, 1, True, 1, "inf"],
    [6, 0, False, 1, "-inf"],
    [7, 1, True, 1, 1e30],
    [10, 0, False, 1, 1e12],
]
"""Around the changes of basis after steps 5 and 10, checkpoints and validations."""


@pytest.mark.parametrize("name", METHODS)
def test_a_disturbed_run_ends_with_the_bits_of_an_undisturbed_one(few_samples, name, poisoned):  # noqa: F811
    config = replace(few_samples, boundary=METHODS[name], checkpoint=CheckpointConfig(interval=6, keep_latest_k=0))
    disturbed = in_folder(config, "disturbed")
    Trainer(config).train()
    poisoned(PLAN)
    assert Trainer(disturbed).train() == "finished"
    told = events(disturbed, Retried)
    assert [(e.step, e.boundary, e.forward) for e in told] == [tuple(entry[:3]) for entry in PLAN]
    assert {event.sender for event in told} == {"process 0"}
    assert events(disturbed, Skipped) == []
    assert [event.loss for event in events(disturbed, Step)] == [event.loss for event in events(config, Step)]
    assert [files_of(disturbed, step) for step in (6, 12)] == [files_of(config, step) for step in (6, 12)]


def start_poisoned(config, plan, rank):
    """Two processes, of which one sends bad values."""
    config.job.dump_folder.mkdir(parents=True)
    file = config.job.dump_folder / "wanted.toml"
    file.write_text(dump_toml(config))
    port = free_port()
    told = {"POISON": json.dumps(plan), "POISON_RANK": str(rank)}
    return [
        WarmProcess(
            "tests.train.poisoning",
            *("train", file),
            env={**ENVIRONMENT, **group_environment(each, 2, port=port), **told},
            stdout=subprocess.PIPE,
        )
        for each in range(2)
    ]


@pytest.mark.parametrize("name", ["aqsgd", *(pytest.param(name, marks=pytest.mark.long) for name in ("plain", "ef21"))])
def test_two_processes_name_the_sender_and_end_with_the_bits_of_one(few_samples, name):  # noqa: F811
    """Three segments: process 0 has two of them, so that boundary 0 is inside of it."""
    config = replace(
        few_samples,
        boundary=METHODS[name],
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        checkpoint=CheckpointConfig(interval=12),
    )
    alone = placed(config, 1, "alone")
    Trainer(alone).train()
    plans = {
        0: [[2, 1, True, 1, "nan"], [5, 0, True, 1, "nan"], [8, 0, False, 1, 1e30], [9, 1, True, 1, 1e12]],
        1: [[1, 1, False, 1, "nan"], [6, 1, False, 1, 1e30]],
    }
    for rank, plan in plans.items():
        two = placed(config, 2, f"two-{rank}")
        for code, printed in map(finish, start_poisoned(two, plan, rank)):
            assert code == 0, printed
        told = [(e.step, e.boundary, e.forward, e.sender) for e in events(two, Retried)]
        assert told == [(*entry[:3], f"process {rank}") for entry in plan]
        assert files_of(two, 12) == files_of(alone, 12)


def test_one_that_is_bad_twice_is_skipped_and_named_and_three_end_the_run(run_config):
    config = replace(run_config, parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2))
    two = placed(config, 2, "two")
    plan = [[2, 1, True, 2, "nan"], *([step, 1, True, 2, "nan"] for step in (5, 6, 7))]
    for code, printed in map(finish, start_poisoned(two, plan, 0)):
        assert code == 1, printed
    named = ("state over boundary 1", "is not finite", "process 0")
    found = [(event.step, event.culprit, event.reason, event.sender) for event in events(two, Skipped)]
    assert found == [(step, *named) for step in (2, 5, 6, 7)]


class Accusing(RunEnvironment):
    """Somebody can remove processes, but not for this step again."""

    def __init__(self, removal_steps):
        self.removal_steps = removal_steps

    def may_accuse(self, step):
        return step != self.removal_steps


def test_nobody_is_accused_after_a_step_that_was_skipped(run_config, poisoned):
    """No weight has changed since: it may be the run itself."""
    poisoned([[step, 0, True, 2, "nan"] for step in (2, 3, 5)])
    trainer = Trainer(run_config, run_environment=Accusing(removal_steps=2))
    with pytest.raises(PoisonedError, match="in step 5"):
        trainer.train()
    assert [event.step for event in events(run_config, Skipped)] == [2, 3]


@pytest.mark.parametrize("name", ["ef", "ef21", "ef21-mask", "aqsgd"])
def test_memories_weights_and_moments_are_untouched(name, poisoned):
    """Values that can be remembered: large, and not yet absurd enough for a float to notice."""
    case, segments = NAMED[name], 3
    config = config_of(case, segments, "GPipe")
    engine = Engine(config, config.model.resolve(VOCABULARY))
    language = SyntheticLanguage(VOCABULARY, seed=1)

    def state():
        kept = {
            name: [digest(p), *map(digest, engine.optimizer.state[p].values())] for name, p in engine.parameters.items()
        }
        tracker = [digest(engine.tracker.su_DK), digest(engine.tracker.trace)] if engine.tracker else None
        return (
            kept,
            tracker,
            [
                {name: digest(tensor) for name, tensor in part.items()}
                for part in codec_states(engine.methods, engine.local_segments).values()
            ],
        )

    poisoned([[step, 1, step % 2 == 0, 1, 1e15] for step in range(5, 9)])
    for step in range(8):
        ids = language.batch(step % 3, batch_size(segments), TOKENS).numpy()
        before = state() if step else None
        outcome = engine.step(step, ids, lr=3e-3)
        assert (outcome.fault is not None) == (step >= 4)
        if outcome.fault is not None:
            assert (outcome.fault.boundary, outcome.fault.forward) == (1, step % 2 == 1)
            assert state() == before
            assert engine.step(step, ids, lr=3e-3).fault is None
        assert state() != before


def test_two_hundred_injections_of_any_kind_are_all_named(run_config, poisoned):
    """At random places; no weight is ever bad, and the last ones are those of the undisturbed run."""
    steps, dice = 200, random.Random(7)
    config = replace(
        run_config,
        training=replace(run_config.training, steps=steps),
        checkpoint=replace(run_config.checkpoint, interval=steps),
    )
    disturbed = in_folder(config, "disturbed")
    Trainer(config).train()
    kinds = ["nan", "inf", "-inf", 1e30, -1e30, 1e12]
    plan = [
        [step, dice.randrange(2), dice.random() < 0.5, 1, dice.choice(kinds if step > 3 else kinds[:5])]
        for step in range(1, steps + 1)
    ]
    poisoned(plan)
    assert Trainer(disturbed).train() == "finished"
    told = [(e.step, e.boundary, e.forward) for e in events(disturbed, Retried)]
    assert told == [tuple(entry[:3]) for entry in plan]
    assert files_of(disturbed, steps) == files_of(config, steps)


@pytest.mark.parametrize(
    "steps",
    [300, pytest.param(int(os.environ.get("CLEAN_STEPS", "2000")), marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_a_clean_run_raises_no_alarm(steps):
    """CLEAN_STEPS=10000 is the full one: a third of them each with a plain method, low bits and a memory."""
    for name in ("subspace-fp32", "subspace-int8-int4", "ef"):
        case = next(case for case in CASES if case.name in (name, f"llama-{name}", f"llama-{name}-fp32"))
        config = config_of(case, 2, "GPipe")
        engine = Engine(config, config.model.resolve(VOCABULARY))
        language = SyntheticLanguage(VOCABULARY, seed=1)
        for step in range(steps // 3):
            ids = language.batch(step, batch_size(2), TOKENS).numpy()
            assert engine.step(step, ids, lr=3e-3).fault is None, (name, step)
            if engine.basis_is_due(step + 1):
                engine.update_basis(ids)
