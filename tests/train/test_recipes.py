"""Runs in bfloat16: equal in every placement and after a resume, with the bytes that the cost model states."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import files_of, steps_of
from tests.train.test_processes import finish, placed, start
from thinpipe.checkpoint import find_checkpoint
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.device.precision import keep_casts
from thinpipe.optim.bf16_update import read_moment
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.training.engine import Engine
from thinpipe.training.trainer import Trainer


def with_precision(config, precision):
    return replace(config, training=replace(config.training, precision=precision))


@pytest.fixture
def bf16_config(run_config):
    """Matrices large enough for 8-bit moments: of ordinary weights and of coordinates, whose basis moves."""
    model = replace(run_config.model, hidden_dim=160, subspace=SubspaceConfig(width=28, free_last=False))
    return with_precision(replace(run_config, model=model), "bf16")


def test_a_bf16_run_is_equal_in_every_placement_and_after_a_resume(bf16_config):
    alone = placed(bf16_config, 1, "alone")
    Trainer(alone).train()
    for schedule in ("1F1B", "GPipe"):
        pair = placed(bf16_config, 2, schedule, pipeline_parallel_schedule=schedule)
        code, printed = finish(start(pair))
        assert code == 0, printed
        assert [event.loss for event in steps_of(pair)] == [event.loss for event in steps_of(alone)]
        assert [files_of(pair, step) for step in (4, 8, 12)] == [files_of(alone, step) for step in (4, 8, 12)]
    resumed = placed(bf16_config, 1, "resumed")
    source = alone.job.dump_folder / "checkpoints" / "step-00000004"
    shutil.copytree(source, resumed.job.dump_folder / "checkpoints" / source.name)
    Trainer(resumed).train()
    assert files_of(resumed, 12) == files_of(alone, 12)
    tensors = find_checkpoint(alone.job.dump_folder).layer("blocks.0")
    assert {tensors[f"blocks.0.mlp.{name}.weight:exp_avg"].dtype for name in ("up_proj", "down_proj")} == {torch.int8}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_mixed_run_is_equal_in_every_placement(run_config, schedule):
    config = with_precision(run_config, "bf16-mixed")
    config = replace(
        config,
        model=replace(config.model, n_layers=4, boundaries=(1, 2, 3)),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
    )
    alone = placed(config, 1, "alone")
    Trainer(alone).train()
    pair = placed(config, 2, schedule, pipeline_parallel_schedule=schedule)
    code, printed = finish(start(pair))
    assert code == 0, printed
    assert [event.loss for event in steps_of(pair)] == [event.loss for event in steps_of(alone)]
    assert files_of(pair, 12) == files_of(alone, 12)


def test_losses_and_norms_of_bf16_are_near_those_of_float32(bf16_config):
    losses, norms = [], []
    for precision in ("fp32", "bf16-mixed", "bf16"):
        config = placed(with_precision(bf16_config, precision), 1, precision)
        Trainer(config).train()
        losses.append([event.loss for event in steps_of(config)])
        norms.append([event.grad_norm for event in steps_of(config)])
    for found, bound in ((losses, 0.01), (norms, 0.1)):
        exact, *others = found
        for other in others:
            assert other != exact
            assert other == pytest.approx(exact, rel=bound)


class CountedCasts(TorchDispatchMode):
    """Counts copies of these tensors into bfloat16."""

    def __init__(self, tensors):
        super().__init__()
        self.wanted, self.count = {tensor.untyped_storage().data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.count += args[0].untyped_storage().data_ptr() in self.wanted
        return func(*args, **(kwargs or {}))


def test_micro_batches_in_flight_share_the_copies_of_weights_unless_these_are_made_again(run_config, monkeypatch):
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    config = replace(with_precision(run_config, "bf16-mixed"), parallelism=parallelism)
    assert config.microbatches == 4

    def step(config):
        engine = Engine(config, config.model.resolve(64))
        weights = [parameter for parameter in engine.parameters.values() if parameter.dim() == 2]
        results = []
        with CountedCasts(weights) as casts:
            for index in range(2):
                ids_BW = np.random.default_rng(index).integers(64, size=(8, 17))
                results.append(engine.step(index, ids_BW, lr=1e-2).loss)
        return results, casts.count / 2

    alone, each = step(config)
    checkpointed = replace(config, execution=replace(config.execution, checkpoint_activations="block"))
    again, twice = step(checkpointed)
    monkeypatch.setattr("thinpipe.training.engine.nullcontext", keep_casts)  # as in a run of several processes
    shared, once = step(config)
    assert shared == alone == again
    assert once > 0
    assert each == once * config.microbatches
    assert each < twice <= 2 * each


def test_sums_are_divided_and_clipped_in_the_update(bf16_config):
    """First moments are a tenth of the mean gradient, whose norm was clipped."""
    config = replace(bf16_config, training=replace(bf16_config.training, max_norm=0.01))
    engine = Engine(config, config.model.resolve(64))
    outcome = engine.step(0, np.random.default_rng(0).integers(64, size=(8, 17)), lr=1e-4)
    assert outcome.grad_norm > 0.1
    states = [engine.optimizer.state[parameter] for parameter in engine.parameters.values()]
    squares = sum(float(read_moment(state, "exp_avg").square().sum()) for state in states)
    assert squares**0.5 == pytest.approx(0.1 * 0.01, rel=0.01)


def test_recipes_with_the_same_state_may_take_turns_and_others_are_refused_by_name(run_config):
    def go_on(precision, steps):
        config = with_precision(run_config, precision)
        Trainer(replace(config, training=replace(config.training, steps=steps))).train()

    go_on("fp32", 4)
    go_on("bf16-mixed", 8)
    with pytest.raises(UserError, match=r"training.precision fp32 or bf16-mixed, and this run has bf16,"):
        go_on("bf16", 12)


def test_a_bf16_checkpoint_is_refused_by_float32(run_config):
    short = replace(run_config, training=replace(run_config.training, steps=4))
    Trainer(with_precision(short, "bf16")).train()
    with pytest.raises(UserError, match=r"training.precision bf16, and this run has fp32 or bf16-mixed"):
        Trainer(with_precision(run_config, "fp32")).train()


def test_a_split_backward_pass_is_refused():
    with pytest.raises(UserError, match=r"ZBVZeroBubble.*stochastic rounding.*1F1B"):
        RunConfig(
            training=TrainingConfig(precision="bf16"),
            parallelism=ParallelismConfig(
                pipeline_parallel_degree=2,
                pipeline_parallel_schedule="ZBVZeroBubble",
                pipeline_parallel_microbatch_size=1,
            ),
        )


KEEL = {
    "boundaries": (1, 3),
    "projection": ProjectionConfig(width=8, token_prior_rank=40, token_prior_window=2, embedding_rank=40),
}
LEARNED = {"boundaries": (1, 3), "projection": ProjectionConfig(kind="learned", width=48)}


@pytest.mark.parametrize(("precision", "nbytes"), [("fp32", 16), ("bf16-mixed", 16), ("bf16", 6)])
@pytest.mark.parametrize("model", [{}, KEEL, LEARNED], ids=["dense", "keel", "learned"])
def test_counted_bytes_are_those_of_the_tensors(model, precision, nbytes):
    config = RunConfig(
        model=ModelSettings(preset="llama-tiny", **model),
        training=TrainingConfig(precision=precision, global_batch_size=2, seq_len=8, device="cpu"),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=1),
    )
    engine = Engine(config, config.model.resolve(512))
    engine.step(0, np.random.default_rng(0).integers(512, size=(2, 9)), lr=1e-4)
    parameters = engine.parameters.values()
    moments = sum(
        tensor.nbytes
        for parameter in parameters
        for key, tensor in engine.optimizer.state[parameter].items()
        if key != "step"
    )
    costs = segment_costs(engine.model.config, config)
    assert sum(cost.weights_nbytes for cost in costs) == sum(p.nbytes for p in parameters)
    assert sum(cost.gradients_nbytes for cost in costs) == sum(p.grad.nbytes for p in parameters)
    assert sum(cost.optimiser_nbytes for cost in costs) == moments
    held = sum(cost.state_nbytes + cost.gradients_nbytes for cost in costs)
    assert held / sum(cost.parameters for cost in costs) == pytest.approx(nbytes, rel=0.02)
