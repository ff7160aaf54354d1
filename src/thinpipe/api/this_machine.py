"""This machine as the machines of a plan: its speed measured now, in about two seconds, unless `thinpipe selftest` has
measured it, and its free memory. Imports torch when it is called."""

from thinpipe.config.run import RunConfig
from thinpipe.core.units import format_flops
from thinpipe.planning.devices import precision_of
from thinpipe.planning.machines import Machine, Machines, rented_cards
from thinpipe.planning.stored_model import PlannedModel

HERE = "here"
"""What `--machines` says for this machine."""
_MEASURED_SECONDS = 1.0


def this_machine(settings: RunConfig, model: PlannedModel) -> Machines:
    """One machine for each process of `thinpipe train` with these settings: they share the processor, or the cards."""
    from thinpipe.config.model import ModelConfig
    from thinpipe.config.precision import recipe_of
    from thinpipe.device.choice import accelerator_count, choose_device
    from thinpipe.device.memory import device_name
    from thinpipe.device.precision import has_bf16_units
    from thinpipe.training.matmul_speed import measure_flops
    from thinpipe.training.memory_check import device_budget, kernel_of

    device, link = choose_device(settings.training.device), settings.link
    name, budget = device_name(device), device_budget(device)
    recipe = recipe_of(settings.training.precision, has_bf16_units=has_bf16_units(device), device=name)
    tokens = settings.microbatch_size * settings.training.seq_len
    sustained = budget.calibration.flops.get(recipe.name)
    flops = sustained or measure_flops(device, tokens=tokens, dim=model.dim, recipe=recipe, seconds=_MEASURED_SECONDS)
    how = "by `thinpipe selftest`" if sustained else "in matrix products, measured now: whole steps are slower"
    assumptions = [f"{name}: {format_flops(flops)} {how}"]
    processes = settings.parallelism.pipeline_parallel_degree
    cards = 1 if device.type == "cpu" else min(processes, accelerator_count())
    if cards > 1:
        assumptions.append(f"all cards are taken to be as {device} ({name})")
    machines = []
    for process in range(processes):
        sharing = len(range(process % cards, processes, cards))
        machines.append(
            Machine(
                name=HERE if processes == 1 else f"{HERE}-{process + 1}",
                flops=flops,
                memory_nbytes=budget.free_nbytes // sharing,
                overhead_nbytes=int(budget.process_nbytes + budget.fragmentation_share * budget.free_nbytes / sharing),
                host_memory_nbytes=budget.host_free_nbytes,
                up_bps=link.up_bps,
                down_bps=link.down_bps,
                latency_s=link.latency_s,
                host=f"card {process % cards}",
                cores=1,
                attention=kernel_of(settings, model, device) if isinstance(model, ModelConfig) else "fused",
                activation_factor=budget.activation_factor,
            )
        )
    return Machines(
        machines=tuple(machines), rented=rented_cards(precision_of(settings)), assumptions=tuple(assumptions)
    )
