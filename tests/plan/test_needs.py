"""What plans say by arithmetic, against the meta device and torch's fake tensors: equal, to the byte and operation."""

from dataclasses import replace

import pytest
import torch

from thinpipe.config.model import ProjectionConfig
from thinpipe.config.run import OptimizerConfig, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.models import PRESETS, ExecutionConfig, GPT2Config, LlamaConfig, SubspaceConfig, build
from thinpipe.pipeline.placement import in_flight_microbatches
from thinpipe.plan import needs as plan
from thinpipe.plan.parameters import segment_shapes
from thinpipe.subspace.factorized_embedding import FactorizedEmbedding
from thinpipe.train import costs
from thinpipe.train.dry_run import count_saved_activations

LLAMA = LlamaConfig(
    vocab_size=97, dim=48, n_layers=5, n_heads=4, n_kv_heads=2, hidden_dim=70, max_seq_len=640, boundaries=(1, 3)
)
GPT2 = GPT2Config(vocab_size=97, dim=48, n_layers=5, n_heads=4, max_seq_len=640, boundaries=(1, 3))
WITH_TOKEN_PRIOR = ProjectionConfig(
    width=8, token_prior_rank=5, token_prior_window=3, embedding_rank=6, bigram_rows=11, bigram_rank=7
)
PAIRS = ProjectionConfig(width=8, bigram_rows=11)
CONFINED = SubspaceConfig(width=9)
EVERYWHERE = SubspaceConfig(width=9, fixed="gaussian", free_last=False)
MODELS = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, boundaries=(), tied=True),
    "llama confined": replace(LLAMA, subspace=CONFINED),
    "llama confined everywhere": replace(LLAMA, subspace=EVERYWHERE),
    "llama confined uncut": replace(LLAMA, subspace=EVERYWHERE, boundaries=()),
    "llama keel": replace(LLAMA, projection=WITH_TOKEN_PRIOR),
    "llama keel of pairs": replace(LLAMA, projection=PAIRS),
    "llama learned": replace(LLAMA, projection=replace(WITH_TOKEN_PRIOR, kind="learned")),
    "llama bottleneck": replace(LLAMA, projection=replace(WITH_TOKEN_PRIOR, kind="bottleneck", hidden=13)),
    "gpt2": GPT2,
    "gpt2 tied": replace(GPT2, boundaries=(), tied=True),
    "gpt2 dropout": replace(GPT2, dropout=0.1),
    "gpt2 confined dropout": replace(GPT2, subspace=CONFINED, dropout=0.1),
    "gpt2 confined everywhere": replace(GPT2, subspace=EVERYWHERE),
    "gpt2 keel": replace(GPT2, projection=replace(WITH_TOKEN_PRIOR, embedding_rank=0)),
    "gpt2 bottleneck": replace(GPT2, projection=ProjectionConfig(kind="bottleneck", width=8)),
}


def way(dtype="float32", *, autocast=False, checkpointed=False, second_moment="row", micro=3, seq=10):
    return RunConfig(
        training=TrainingConfig(dtype=dtype, global_batch_size=6, seq_len=seq),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=micro),
        optimizer=OptimizerConfig(second_moment=second_moment),
        execution=ExecutionConfig(autocast_bf16=autocast, checkpoint_activations=checkpointed),
    )


WAYS = {
    "plain": way(),
    "bfloat16 checkpointed": way("bfloat16", checkpointed=True, second_moment="element"),
    "autocast of one sample": way(autocast=True, micro=1, seq=600),
}
MORE_WAYS = {
    "autocast checkpointed": way(autocast=True, checkpointed=True),
    "float64": way("float64", autocast=True, micro=6),
    "bfloat16 of one long sample": way("bfloat16", micro=1, seq=600),
}


def check(model, config, indices=None):
    built, said = build(model), plan.segment_needs(model, config)
    dtype = getattr(torch, config.training.dtype)
    for index in range(len(said)) if indices is None else indices:
        need, segment = said[index], built.segments[index]
        numel = sum(parameter.numel() for parameter in segment.parameters())
        assert (need.parameters, need.weights_nbytes) == (numel, numel * dtype.itemsize), index
        assert need.weights_nbytes + need.optimiser_nbytes == costs._state_nbytes(segment, config), index
        assert need.gradients_nbytes == need.weights_nbytes
        assert need.tables_nbytes == tables_nbytes(segment) * dtype.itemsize, index
        flops = need.forward_flops_per_token + need.backward_flops_per_token
        assert flops == costs._flops_per_token(segment, config), index
        sizes = {"batch": config.microbatch_size, "tokens": config.training.seq_len, "dtype": dtype}
        saved = count_saved_activations(segment, config.execution, **sizes)
        assert (need.activation_nbytes, need.peak_extra_nbytes) == (saved.nbytes, saved.peak_extra_nbytes), index
    assert plan.shared_nbytes(model, config) == costs.shared_nbytes(model, config)


def tables_nbytes(segment):
    """Numbers in embeddings and in what widens them."""
    tables = [module for module in segment.modules() if isinstance(module, torch.nn.Embedding | FactorizedEmbedding)]
    owned = {id(parameter): parameter.numel() for table in tables for parameter in table.parameters()}
    return sum(owned.values())


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_needs_are_those_of_the_model_itself(model, config):
    check(model, config)


@pytest.mark.parametrize("config", MORE_WAYS.values(), ids=MORE_WAYS)
@pytest.mark.parametrize("name", ["llama bottleneck", "llama confined everywhere", "gpt2 confined dropout"])
def test_and_in_other_precisions(name, config):
    check(MODELS[name], config)


@pytest.mark.parametrize("settings", [{"subspace": SubspaceConfig(width=40)}, {"projection": WITH_TOKEN_PRIOR}])
def test_needs_of_a_large_model_in_32_segments(settings):
    model = replace(PRESETS["llama-8b"], boundaries=tuple(range(1, 32)), **settings)
    check(model, way(autocast=True, micro=1, seq=2048), indices=(0, 1, 31))


def test_needs_of_a_real_gpt2():
    check(PRESETS["gpt2"], way(seq=1024))
    check(replace(PRESETS["gpt2"], tied=False, boundaries=(6,)), way(seq=1024, autocast=True))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("micro", [1, 6])
def test_memory_follows_the_law_that_assigns_segments(schedule, micro):
    config = way(micro=micro)
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule))
    for processes in (1, 2, 3):
        assigned = costs.segment_needs(LLAMA, config, processes=processes)
        planned = plan.segment_needs(LLAMA, config)
        for index, (one, other) in enumerate(zip(assigned, planned, strict=True)):
            together = in_flight_microbatches(index, 3, processes, config)
            assert one.memory_nbytes == plan.memory_nbytes(other, config, together)


def test_backward_is_twice_forward_but_for_what_is_computed_again():
    [need] = plan.segment_needs(MODELS["llama tied"], way())
    assert need.backward_flops_per_token == 2 * need.forward_flops_per_token
    [again] = plan.segment_needs(MODELS["llama tied"], way(checkpointed=True))
    head = 2 * 97 * 48
    assert again.forward_flops_per_token == need.forward_flops_per_token
    assert again.backward_flops_per_token == 3 * need.forward_flops_per_token - head


def test_a_tied_head_is_the_table_and_counts_once():
    [shapes] = segment_shapes(MODELS["gpt2 tied"])
    assert sum(each.numel == 97 * 48 for each in shapes.unique_parameters) == 1
    assert sum(each.numel == 97 * 48 and each.is_matmul for each in shapes.last) == 1
