"""Attention keeps no scores where a fused kernel exists, with keys and values repeated where only that brings it."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinpipe.config.parameter_shapes import attention_heads
from thinpipe.config.run import ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.device.attention import attention_kernel
from thinpipe.models import ExecutionConfig, LlamaConfig, build, materialise
from thinpipe.planning.partition import Traffic, make_partition
from thinpipe.planning.segment_costs import needs_by_kernel
from thinpipe.swarm.peer.machine_probe import measure_machine
from thinpipe.swarm.protocol.machine_report import MachineReport

TOKENS = 256
LLAMA = LlamaConfig(
    vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, max_seq_len=TOKENS, boundaries=(1,)
)
SHAPES = {"heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.fixture
def ungrouped(sim):
    """The device without a fused kernel for grouped queries."""
    attention_kernel.cache_clear()
    sim.set_grouped_attention(False)
    yield sim
    sim.set_grouped_attention(True)
    attention_kernel.cache_clear()


def kernel_on(name, **changes):
    return attention_kernel(torch.device(name), torch.float32, **SHAPES | changes)


def test_torch_is_asked_for_the_kernel(sim):  # noqa: ARG001
    attention_kernel.cache_clear()
    assert [kernel_on("cpu"), kernel_on("sim:0")] == ["fused", "fused"]


def test_keys_are_repeated_where_grouped_queries_have_no_fused_kernel(ungrouped):  # noqa: ARG001
    assert kernel_on("sim:0") == "fused-repeated"
    assert kernel_on("sim:0", kv_heads=4) == "fused"
    assert kernel_on("cpu") == "fused"


def test_a_device_without_fused_kernels_has_the_math_kernel():
    attention_kernel.cache_clear()
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_on("cpu") == "math"
    attention_kernel.cache_clear()


def step(device, *, choose):
    """Gradients of a model on the CPU, and the peak of the device's allocator beside its weights."""
    model = materialise(build(LLAMA), seed=1, device=torch.device(device))
    if choose:
        model.set_execution(ExecutionConfig())
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    measured = torch.accelerator if device != "cpu" else None
    if measured:
        measured.reset_peak_memory_stats()
        before = measured.memory_allocated()
    model(ids).square().mean().backward()
    peak = measured.max_memory_allocated() - before if measured else 0
    return [parameter.grad.cpu() for parameter in model.parameters()], peak


def test_repeated_keys_give_the_same_gradients_with_less_memory(ungrouped):  # noqa: ARG001
    expected, _ = step("cpu", choose=True)
    math, with_scores = step("sim:0", choose=False)
    repeated, without = step("sim:0", choose=True)
    for right, *found in zip(expected, math, repeated, strict=True):
        for gradient in found:
            torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-8)
    scores = 4 * TOKENS * TOKENS * 4 * LLAMA.n_layers
    assert with_scores - without > 0.8 * scores


def test_keys_are_as_they_are_where_grouped_queries_are_fused(sim):  # noqa: ARG001
    """And so the bits are those of the CPU."""
    attention_kernel.cache_clear()
    (plain, _), (chosen, _) = step("cpu", choose=False), step("sim:0", choose=True)
    assert all(torch.equal(left, right) for left, right in zip(plain, chosen, strict=True))


def test_a_peer_tells_its_kernel_and_gets_no_segment_that_needs_more_than_it_has(ungrouped):  # noqa: ARG001
    config = RunConfig(
        training=TrainingConfig(global_batch_size=4, seq_len=TOKENS, device="sim", precision="fp32"),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=1),
    )
    processor = measure_machine(config, dim=64, heads=attention_heads(LLAMA), seconds=0.1)
    assert processor.attention == "fused-repeated"
    needs = needs_by_kernel(LLAMA, config)
    assert all(need.memory_nbytes < need.attention_nbytes["fused-repeated"] for need in needs)
    assert all(need.attention_nbytes["fused-repeated"] < need.attention_nbytes["math"] for need in needs)
    memory_nbytes = sum(need.memory_nbytes for need in needs)

    def placed(attention):
        report = MachineReport(
            processor=structs.replace(processor, attention=attention, memory_nbytes=memory_nbytes),
            up_bps=1e9,
            down_bps=1e9,
            latency_s=0.1,
            versions={},
        )
        machines = [replace(report.machine(name), flops=flops) for name, flops in (("fast", 1e12), ("slow", 1e3))]
        traffic = Traffic(forward_nbytes=1, backward_nbytes=1)
        return make_partition(needs, machines, traffic, hub_up_bps=1e9, hub_down_bps=1e9).stages

    assert [len(placed(attention)) for attention in ("fused", "fused-repeated")] == [1, 2]
