"""Refuses a run that does not fit into the memory of this machine, before data are opened or weights are made.

The functions of a run on the CPU import no torch, so that the answer comes at once. Setting: training.check_memory.
"""

import os
import sys
from typing import TYPE_CHECKING

from thinpipe.config.model import ModelConfig
from thinpipe.config.model_family import AttentionKernel
from thinpipe.config.parameter_shapes import attention_heads
from thinpipe.config.precision import Recipe, recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.device.host import free_host_nbytes, is_surely_cpu, processor_name, refuse_absent_accelerator
from thinpipe.planning.calibration import Calibration, device_key, load_calibrations
from thinpipe.planning.fitting import LocalFit
from thinpipe.planning.memory_budget import MemoryBudget
from thinpipe.planning.model_shape import resolve_model
from thinpipe.planning.segment_costs import with_precision
from thinpipe.planning.stored_model import PlannedModel, StoredModel, stored_model_of

if TYPE_CHECKING:
    import torch


def check_before_torch(config: RunConfig) -> None:
    """Check of a run that computes on the CPU for certain, all its processes of this machine together; another run is
    checked by each of its processes (`check_on_device`). Raises UserError, also for an accelerator that this
    installation of torch can have none of."""
    refuse_absent_accelerator(config.training.device)
    if not is_surely_cpu(config.training.device):
        return
    started = os.environ.get("LOCAL_WORLD_SIZE")
    ranks = range(config.parallelism.pipeline_parallel_degree) if started is None else _local_ranks()
    loaded = len(ranks) == 1 and "torch" in sys.modules
    _check(_with_recipe(config), host_budget(), tuple(ranks), starting=0 if loaded else len(ranks))


def check_on_device(config: RunConfig) -> None:
    """Check of the processes that share the device of this one. Raises UserError."""
    from thinpipe.device.choice import choose_device, ranks_on_device

    if is_surely_cpu(config.training.device):
        return
    device = choose_device(config.training.device)
    ranks = ranks_on_device(config.training.device, device, _local_ranks())
    _check(_with_recipe(config, device), device_budget(device), ranks, starting=len(ranks) - 1, device=device)


def check_assignment(config: RunConfig, vocab_size: int, rank: int, *, rejoin: str) -> None:
    """Check of the segments that a hub has assigned to this machine, before they are made: its memory may have been
    freer when it was measured. Raises UserError. `rank`: place of this machine in the pipeline; `rejoin`: the command
    that measures it anew. The size of a base that is not here yet is not known, and not checked."""
    from thinpipe.device.choice import choose_device

    if not config.training.check_memory or config.model.hf is not None:
        return
    device = choose_device(config.training.device)
    model, here = resolve_model(config, vocab_size)[0], _with_recipe(config, device)
    fit = LocalFit(model=model, budget=device_budget(device), ranks=(rank,), attention=kernel_of(here, model, device))
    if not fit.judge(here).fits:
        raise UserError(
            f"{fit.describe_need(here)}. This is for the segments that the hub has assigned to this machine: close "
            f"other programs, then run `{rejoin}`, which measures it anew and gets what fits"
        )


def _local_ranks() -> range:
    """Ranks of the processes on this machine, as torchrun and the local launcher number them."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _check(
    config: RunConfig,
    budget: MemoryBudget,
    ranks: tuple[int, ...],
    *,
    starting: int,
    device: "torch.device | None" = None,
) -> None:
    if not config.training.check_memory:
        return
    try:
        stored = stored_model_of(config)
        if stored is None and config.model.hf is not None:  # no weights here: the run itself says so
            return
        model = stored or resolve_model(config, None)[0]
        attention: AttentionKernel = "fused"
        if device is not None and not isinstance(model, StoredModel):
            attention = kernel_of(config, model, device)
    except UserError:  # of the settings, or no connection to a model hub: the run itself raises it, with more words
        return
    refuse_if_too_large(
        config, LocalFit(model=model, budget=budget, ranks=ranks, starting=starting, attention=attention)
    )


def refuse_if_too_large(config: RunConfig, fit: LocalFit) -> None:
    """Raises UserError with what would make the run fit. Settings that cannot run at all are left to the run, which
    says more of them."""
    try:
        fits = fit.judge(config).fits
    except UserError:
        return
    if not fits:
        lines = [fit.describe_need(config), "what would make it fit, from the least harm:", *fit.advice(config)]
        lines.append("training.check_memory = false starts the run all the same")
        raise UserError("\n  ".join(lines))


def local_fit(config: RunConfig, model: PlannedModel, device: "torch.device") -> tuple[RunConfig, LocalFit]:
    """The settings with the recipe of this device, and the fit of all processes of the run on it."""
    here, ranks = _with_recipe(config, device), tuple(range(config.parallelism.pipeline_parallel_degree))
    attention: AttentionKernel = "fused" if isinstance(model, StoredModel) else kernel_of(here, model, device)
    return here, LocalFit(model=model, budget=device_budget(device), ranks=ranks, attention=attention)


def kernel_of(config: RunConfig, model: ModelConfig, device: "torch.device") -> AttentionKernel:
    """Kernel of attention in training on this device."""
    return kernel_for(config.planned_recipe, attention_heads(model), device)


def kernel_for(recipe: Recipe, heads: tuple[int, int, int], device: "torch.device") -> AttentionKernel:
    """As `kernel_of`, for this many query heads, key heads and numbers in a head."""
    import torch

    from thinpipe.device.attention import attention_kernel

    dtype = torch.bfloat16 if recipe.uses_bf16 else getattr(torch, recipe.weights)
    n_heads, kv_heads, width = heads
    return attention_kernel(device, dtype, heads=n_heads, kv_heads=kv_heads, head_dim=width)


def _with_recipe(config: RunConfig, device: "torch.device | None" = None) -> RunConfig:
    """Settings with the precision that `auto` chooses on this device; None: on a CPU."""
    if device is None:
        return with_precision(config, recipe_of(config.training.precision, has_bf16_units=None, device="").name)
    from thinpipe.device.memory import device_name
    from thinpipe.device.precision import has_bf16_units

    units, name = has_bf16_units(device), device_name(device)
    return with_precision(config, recipe_of(config.training.precision, has_bf16_units=units, device=name).name)


def host_budget() -> MemoryBudget:
    name = processor_name()
    calibration = load_calibrations().get(device_key("cpu", name), Calibration())
    return MemoryBudget(place=f"the CPU ({name})", free_nbytes=free_host_nbytes(), calibration=calibration)


def device_budget(device: "torch.device") -> MemoryBudget:
    from thinpipe.device.memory import device_name, free_nbytes, has_own_memory

    if device.type == "cpu":
        return host_budget()
    name = device_name(device)
    return MemoryBudget(
        place=f"{device} ({name})",
        free_nbytes=free_nbytes(device),
        host_free_nbytes=free_host_nbytes() if has_own_memory(device) else None,
        calibration=load_calibrations().get(device_key(device.type, name), Calibration()),
    )
