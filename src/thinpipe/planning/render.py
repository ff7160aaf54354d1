"""Rendering of a plan: rich text for the terminal, a dictionary for `--json`. Computes no new estimates."""

import math
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.core.units import format_count, format_duration_ceil
from thinpipe.planning.advice import Change
from thinpipe.planning.alternatives import Alternatives
from thinpipe.planning.devices import RENTED_PRICES_OF
from thinpipe.planning.machine_loads import MachineLoad
from thinpipe.planning.machines import Hub, Machine
from thinpipe.planning.measured_loss import describe_loss_gap
from thinpipe.planning.planner import Cost, Plan, utilization_of
from thinpipe.planning.stored_model import StoredModel

_SHOWN_CHANGES = 3


def render(plan: Plan, limit: str, changes: list[Change], cost: Cost, others: Alternatives) -> RenderableType:
    blocks: list[RenderableType] = [_verdict(plan), "", _machines_table(plan), "", _speeds_table(plan), ""]
    if isinstance(plan.model, StoredModel):
        blocks += [_downloads_table(plan), ""]
    blocks += _sentences(plan, cost)
    blocks.append(Text(f"what limits it: {limit}"))
    heading = "what to change first" if plan.fits else "to make it fit"
    for number, change in enumerate(changes[:_SHOWN_CHANGES] if plan.fits else changes, start=1):
        start, gain = ("or: ", f" ({change.speedup:.2f} times as fast)") if plan.fits else ("  ", "")
        blocks.append(Text(f"{f'{heading}: ' if number == 1 else start}{change.description}{gain}"))
    blocks += [Text(line) for line in _alternatives(others)]
    blocks += [Text(f"assumed: {words}", style="dim") for words in _assumptions(plan, others)]
    return Group(*blocks)


def _alternatives(others: Alternatives) -> Iterator[str]:
    if others.streaming is not None:
        there = others.streaming
        yield (
            f"instead, {there.machine.name} without the others, the model in its host's memory and copied to the card "
            f"for every micro-batch of {there.plan.config.microbatch_size} (with another tool), at best: "
            f"{_time_and_price(there.cost, there.currency)}"
        )
    for each in (others.one_machine, others.rented):
        if each is not None:
            name = f"one rented {each.machine.name}" if each.rented else f"{each.machine.name} without the others"
            with_settings = f", with {' and '.join(each.settings)}" if each.settings else ""
            yield f"instead, {name}: {_time_and_price(each.cost, each.currency)}{with_settings}"
    if others.verdict:
        yield others.verdict


def _assumptions(plan: Plan, others: Alternatives) -> list[str]:
    """Assumptions of the plan and of the alternatives, each once."""
    found = [*plan.assumptions]
    for each in (others.one_machine, others.rented):
        found += each.plan.assumptions if each is not None else ()
    if others.rented is not None and plan.machines.rented_price_assumed:
        card = others.rented.machine
        found.append(
            f"{card.price_per_hour:.2f} USD an hour for a rented {card.name}, a price of {RENTED_PRICES_OF} ([rented])"
        )
    return [*dict.fromkeys(found)]


def _time_and_price(cost: Cost, currency: str) -> str:
    hours = f"{cost.hours:,.1f} hours" if cost.hours < 72 else f"{cost.hours / 24:,.1f} days"
    return hours if cost.money is None else f"{hours}, {cost.money:,.2f} {currency}"


def _verdict(plan: Plan) -> Text:
    model, parameters = plan.model, sum(machine_load.parameters for machine_load in plan.machine_loads)
    lora = plan.config.lora
    adapted = "" if lora is None else f" in adapters of rank {lora.r}"
    text = Text(
        f"{plan.config.model.hf or plan.config.model.preset}: {format_count(parameters)} trainable numbers{adapted}, "
        f"{model.n_layers} blocks in "
        f"{len(model.segments)} segments on {len(plan.machine_loads)} machine(s): "
    )
    text.append("it fits" if plan.fits else "IT DOES NOT FIT", style="bold green" if plan.fits else "bold red")
    text.append(f", {plan.tokens_per_second:,.0f} tokens/s", style="bold")
    text.append(f" (a step of {format_count(plan.tokens_per_step)} tokens in {_seconds(plan.timeline.seconds)})")
    return text


def _machines_table(plan: Plan) -> Table:
    other = "frozen" if isinstance(plan.model, StoredModel) else "tables"
    kinds = ["weights", other, "grads", "optim.", "activ.", "other", "total", "of", "host"]
    if not any(load.memory.host for load in plan.machine_loads):
        kinds.remove("host")
    table = _table("memory, GB", "blocks", *kinds)
    for machine_load in plan.machine_loads:
        memory = machine_load.memory
        sizes = (
            memory.weights - memory.tables,
            memory.tables + memory.frozen,
            memory.gradients,
            memory.optimiser,
            memory.activations,
            memory.overhead,
            memory.total,
            machine_load.machine.memory_nbytes,
            memory.host,
        )[: len(kinds)]
        style = None if machine_load.fits else "red"
        table.add_row(
            machine_load.machine.name,
            _blocks(plan, machine_load),
            *(f"{size / 1e9:.2f}" if size or kind != "host" else "" for kind, size in zip(kinds, sizes, strict=True)),
            style=style,
        )
    for name in plan.standbys:
        table.add_row(name, "standby", style="dim")
    return table


def _downloads_table(plan: Plan) -> Table:
    """What each machine downloads once and sends with every checkpoint."""
    table = _table("files", "of the base, once, GB", "takes", "each checkpoint, GB", "takes")
    for load in plan.machine_loads:
        up, down = load.machine.up_bps, load.machine.down_bps
        table.add_row(
            load.machine.name,
            f"{load.download_nbytes / 1e9:.2f}",
            format_duration_ceil(8 * load.download_nbytes / down),
            f"{load.commit_nbytes / 1e9:.3f}",
            format_duration_ceil(8 * load.commit_nbytes / up),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    return table


def _blocks(plan: Plan, machine_load: MachineLoad) -> str:
    blocks = [block for segment in machine_load.segments for block in plan.model.segments[segment]]
    if len(blocks) == 1:
        return str(blocks[0])
    return f"{blocks[0]}-{blocks[-1]}" if blocks[-1] - blocks[0] == len(blocks) - 1 else f"{len(blocks)} blocks"


def _speeds_table(plan: Plan) -> Table:
    """Speed and utilization of each machine and link."""
    table = _table("up / down", "TFLOP/s", "busy", "Mbps", "bytes/token", "MB a step", "link busy")
    for index, (machine_load, busy) in enumerate(zip(plan.machine_loads, plan.timeline.busy, strict=True)):
        machine = machine_load.machine
        own = (f"{machine.flops / 1e12:.3g}", f"{busy / plan.timeline.seconds:.0%}")
        table.add_row(
            machine.name, *own, *_both_directions(plan, f"up {index}", f"down {index}", f"link {index}", machine)
        )
    if plan.machines.hub is not None and len(plan.machine_loads) > 1:
        table.add_row("the hub", "", "", *_both_directions(plan, "hub up", "hub down", "hub", plan.machines.hub))
    return table


def _both_directions(plan: Plan, up: str, down: str, shared: str, end: Machine | Hub) -> tuple[str, ...]:
    """Cells of a link: up / down, or a single figure for a half-duplex link."""
    nbytes, busy = plan.timeline.link_nbytes, plan.timeline.link_busy
    used = [shared] if shared in nbytes else [up, down]
    return (
        f"{_rate(end.up_bps)} / {_rate(end.down_bps)}",
        " / ".join(f"{nbytes[link] / plan.tokens_per_step:,.0f}" for link in used),
        " / ".join(f"{nbytes[link] / 1e6:.3g}" for link in used),
        " / ".join(f"{busy[link] / plan.timeline.seconds:.0%}" for link in used),
    )


def _rate(bits_per_second: float) -> str:
    return "no limit" if math.isinf(bits_per_second) else f"{bits_per_second / 1e6:,.4g}"


def _sentences(plan: Plan, cost: Cost) -> list[Text]:
    lines = []
    if len(plan.machine_loads) > 1:
        lines.append(
            f"each boundary carries {plan.nbytes_per_token:,.0f} bytes a token in both directions, "
            f"{plan.compression_ratio:.1f} times fewer than dense bf16; its cost: "
            f"{describe_loss_gap(plan.model, plan.config.boundary, plan.compression_ratio)}"
        )
        lines.append(f"machines wait for {plan.timeline.bubble:.0%} of their time")
    paid = "" if cost.money is None else " for those that compute"
    lines.append(f"{format_count(cost.tokens)} tokens: {_time_and_price(cost, plan.machines.currency)}{paid}")
    return [Text(line) for line in lines]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 90 else format_duration_ceil(seconds)


def _finite(nbytes: float | None) -> int | None:
    return None if nbytes is None or math.isinf(nbytes) else int(nbytes)


def as_dict(plan: Plan, limit: str, changes: list[Change], cost: Cost, others: Alternatives) -> dict[str, Any]:
    """The whole plan as JSON-compatible values."""
    seconds = plan.timeline.seconds
    return {
        "fits": plan.fits,
        "tokens_per_second": plan.tokens_per_second,
        "step_seconds": seconds,
        "tokens_per_step": plan.tokens_per_step,
        "bubble": plan.timeline.bubble,
        "machines": [
            {
                "name": machine_load.machine.name,
                "segments": list(machine_load.segments),
                "blocks": machine_load.blocks,
                "parameters": machine_load.parameters,
                "memory_nbytes": {
                    "weights": machine_load.memory.weights,
                    "gradients": machine_load.memory.gradients,
                    "optimiser": machine_load.memory.optimiser,
                    "activations": machine_load.memory.activations,
                    "frozen_tables": machine_load.memory.frozen,
                    "overhead": machine_load.memory.overhead,
                    "total": machine_load.memory.total,
                    "available": machine_load.machine.memory_nbytes,
                    "missing": machine_load.missing_nbytes,
                },
                "host_memory_nbytes": {
                    "total": machine_load.memory.host,
                    "available": _finite(machine_load.machine.host_memory_nbytes),
                    "missing": machine_load.missing_host_nbytes,
                },
                "token_tables_nbytes": machine_load.memory.tables,
                "base_download_nbytes": machine_load.download_nbytes,
                "checkpoint_nbytes": machine_load.commit_nbytes,
                "busy": busy / seconds,
            }
            for machine_load, busy in zip(plan.machine_loads, plan.timeline.busy, strict=True)
        ],
        "standbys": list(plan.standbys),
        "boundary": {
            "bytes_per_token": plan.nbytes_per_token,
            "times_fewer_than_dense_bf16": plan.compression_ratio,
            "loss": describe_loss_gap(plan.model, plan.config.boundary, plan.compression_ratio),
        },
        "links": [
            {
                "link": plan.describe(utilization),
                "bytes_per_step": plan.timeline.link_nbytes[link],
                "bytes_per_token": plan.timeline.link_nbytes[link] / plan.tokens_per_step,
                "busy": utilization.share,
            }
            for link, busy in plan.timeline.link_busy.items()
            for utilization in [utilization_of(link, busy / seconds)]
        ],
        "bottleneck": limit,
        "changes": [{"change": change.description, "times_as_fast": change.speedup} for change in changes],
        "tokens": cost.tokens,
        "hours": cost.hours,
        "money": cost.money,
        "currency": plan.machines.currency,
        "alternatives": [
            {
                "machine": each.machine.name,
                "rented": each.rented,
                "settings": list(each.settings),
                "tokens_per_second": each.plan.tokens_per_second,
                "hours": each.cost.hours,
                "money": each.cost.money,
                "currency": each.currency,
            }
            for each in (others.one_machine, others.streaming, others.rented)
            if each is not None
        ],
        "verdict": others.verdict,
        "settings": {
            "boundaries": list(plan.model.boundaries),
            "schedule": plan.config.parallelism.pipeline_parallel_schedule,
            "microbatch_size": plan.config.microbatch_size,
            "extra_microbatches": plan.config.parallelism.pipeline_parallel_extra_microbatches,
        },
        "assumptions": _assumptions(plan, others),
    }
