"""What plans say by arithmetic, against the meta device and torch's fake tensors: equal, to the byte and operation."""

from dataclasses import replace

import pytest

from tests.plan import fake_tensor_oracle as oracle
from tests.plan.fake_tensor_oracle import check_costs
from thinpipe.config.model import ProjectionConfig
from thinpipe.config.model_family import MAX_LOGITS, vocabulary_chunk
from thinpipe.config.parameter_shapes import segment_shapes
from thinpipe.config.run import OptimizerConfig, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.models import PRESETS, ExecutionConfig, GPT2Config, LlamaConfig, SubspaceConfig
from thinpipe.planning import segment_costs as plan

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


def way(precision="fp32", *, checkpointing="none", second_moment="row", micro=3, seq=10):
    return RunConfig(
        training=TrainingConfig(precision=precision, global_batch_size=6, seq_len=seq),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=micro),
        optimizer=OptimizerConfig(second_moment=second_moment),
        execution=ExecutionConfig(checkpoint_activations=checkpointing),
    )


WAYS = {
    "plain": way(),
    "bfloat16 checkpointed": way("bf16", checkpointing="block", second_moment="element"),
    "autocast of one sample": way("bf16-mixed", micro=1, seq=600),
    "checkpointed by segment": way(checkpointing="segment"),
}
MORE_WAYS = {
    "autocast checkpointed": way("bf16-mixed", checkpointing="block"),
    "float64": way("fp64", micro=6),
    "autocast checkpointed by segment": way("bf16-mixed", checkpointing="segment", micro=1),
    "bfloat16 checkpointed by segment": way("bf16", checkpointing="segment"),
    "bfloat16 of one long sample": way("bf16", micro=1, seq=600),
}


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_costs_are_those_of_the_model_itself(model, config):
    check_costs(model, config)


@pytest.mark.parametrize("config", MORE_WAYS.values(), ids=MORE_WAYS)
@pytest.mark.parametrize("name", ["llama bottleneck", "llama confined everywhere", "gpt2 confined dropout"])
def test_and_in_other_precisions(name, config):
    check_costs(MODELS[name], config)


@pytest.mark.parametrize("settings", [{"subspace": SubspaceConfig(width=40)}, {"projection": WITH_TOKEN_PRIOR}])
def test_costs_of_a_large_model_in_32_segments(settings):
    model = replace(PRESETS["llama-8b"], boundaries=tuple(range(1, 32)), **settings)
    check_costs(model, way("bf16-mixed", micro=1, seq=2048), indices=(0, 1, 31))


def test_costs_of_a_real_gpt2():
    check_costs(PRESETS["gpt2"], way(seq=1024))
    check_costs(replace(PRESETS["gpt2"], tied=False, boundaries=(6,)), way("bf16-mixed", seq=1024))


@pytest.mark.parametrize("attention", ["fused-repeated", "math"])
@pytest.mark.parametrize("config", [*WAYS.values(), way("bf16", seq=600)], ids=[*WAYS, "bfloat16 of long samples"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2 dropout"])
def test_costs_of_other_attention_kernels(name, config, attention):
    check_costs(MODELS[name], config, indices=[1], attention=attention)


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["llama tied", "llama confined", "llama confined everywhere", "gpt2"])
def test_costs_where_logits_are_too_many_to_exist_at_once(name, config):
    tokens = config.microbatch_size * config.training.seq_len
    model = replace(MODELS[name], vocab_size=MAX_LOGITS // tokens + 100)
    assert vocabulary_chunk(tokens, model.vocab_size) < model.vocab_size
    check_costs(model, config, indices=[len(model.segments) - 1])


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("micro", [1, 6])
def test_memory_follows_the_law_that_assigns_segments(schedule, micro):
    config = way(micro=micro)
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule))
    for processes in (1, 2, 3):
        measured = oracle.segment_needs(LLAMA, config, processes=processes)
        assert plan.segment_needs(plan.segment_costs(LLAMA, config), config, processes=processes) == measured


def test_backward_is_twice_forward_but_for_what_is_computed_again():
    [cost] = plan.segment_costs(MODELS["llama tied"], way())
    assert cost.backward_flops_per_token == 2 * cost.forward_flops_per_token
    [again] = plan.segment_costs(MODELS["llama tied"], way(checkpointing="block"))
    head = 2 * 97 * 48
    assert again.forward_flops_per_token == cost.forward_flops_per_token
    assert again.backward_flops_per_token == 3 * cost.forward_flops_per_token - head


def test_a_tied_head_is_the_table_and_counts_once():
    [shapes] = segment_shapes(MODELS["gpt2 tied"])
    assert sum(each.numel == 97 * 48 for each in shapes.unique_parameters) == 1
    assert sum(each.numel == 97 * 48 and each.is_matmul for each in shapes.last) == 1
