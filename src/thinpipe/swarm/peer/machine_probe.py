"""Measures a peer's machine: floating-point rate in matrix products, and memory that a run may use.

Whole steps are slower by much the same factor everywhere: the partition of segments over peers comes out right,
predicted step times come out too short. Links are measured by bandwidth_probe.
"""

import torch

from thinpipe.config.precision import recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.device.choice import choose_device
from thinpipe.device.device_class import device_class
from thinpipe.device.memory import device_name
from thinpipe.device.precision import has_bf16_units
from thinpipe.swarm.protocol.machine_report import ProcessorReport
from thinpipe.training.matmul_speed import measure_flops
from thinpipe.training.memory_check import device_budget, kernel_for


def measure_machine(
    config: RunConfig,
    *,
    dim: int,
    heads: tuple[int, int, int],
    memory_limit_nbytes: int | None = None,
    seconds: float = 1.0,
) -> ProcessorReport:
    """Measures for about `seconds`. `dim`: hidden dimension of the model; `heads`: number of query heads and of key
    heads in a block, and their width; `memory_limit_nbytes`: the owner's limit on memory."""
    device = choose_device(config.training.device)
    recipe = recipe_of(config.training.precision, has_bf16_units=has_bf16_units(device), device=device_name(device))
    flops = measure_flops(
        device, tokens=config.microbatch_size * config.training.seq_len, dim=dim, recipe=recipe, seconds=seconds
    )
    budget = device_budget(device)
    return ProcessorReport(
        device=device_name(device),
        device_class=device_class(device),
        threads=torch.get_num_threads(),
        flops=flops,
        memory_nbytes=budget.offered_nbytes(memory_limit_nbytes),
        host_memory_nbytes=budget.offered_host_nbytes,
        attention=kernel_for(recipe, heads, device),
    )
