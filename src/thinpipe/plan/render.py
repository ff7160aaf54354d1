"""A plan for people (rich) and for programs (JSON). Says nothing that the plan does not hold."""

import math
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.core.units import say_count, say_duration
from thinpipe.plan.advice import Change
from thinpipe.plan.bill import Bill
from thinpipe.plan.draft import Draft, load_of
from thinpipe.plan.machines import Hub, Machine
from thinpipe.plan.measured import say_gap
from thinpipe.plan.parts import Part

_SHOWN_CHANGES = 3


def render(plan: Draft, limit: str, changes: list[Change], cost: Bill) -> RenderableType:
    parts: list[RenderableType] = [_verdict(plan), "", _machines_table(plan), "", _speeds_table(plan), ""]
    parts += _sentences(plan, cost)
    parts.append(Text(f"what limits it: {limit}"))
    heading = "what to change first" if plan.fits else "to make it fit"
    for number, change in enumerate(changes[:_SHOWN_CHANGES], start=1):
        gain = f" ({change.faster:.2f} times as fast)" if plan.fits else ""
        parts.append(Text(f"{heading if number == 1 else 'or'}: {change.words}{gain}"))
    parts += [Text(f"assumed: {words}", style="dim") for words in plan.assumptions]
    return Group(*parts)


def _verdict(plan: Draft) -> Text:
    model, parameters = plan.model, sum(part.parameters for part in plan.parts)
    text = Text(
        f"{plan.config.model.preset}: {say_count(parameters)} trainable numbers, {model.n_layers} blocks in "
        f"{len(model.segments)} segments on {len(plan.parts)} machine(s): "
    )
    text.append("it fits" if plan.fits else "IT DOES NOT FIT", style="bold green" if plan.fits else "bold red")
    text.append(f", {plan.tokens_per_second:,.0f} tokens/s", style="bold")
    text.append(f" (a step of {say_count(plan.tokens_per_step)} tokens in {_seconds(plan.timeline.seconds)})")
    return text


def _machines_table(plan: Draft) -> Table:
    kinds = ("weights", "tables", "grads", "optim.", "activ.", "other", "total", "of")
    table = _table("memory, GB", "blocks", *kinds)
    for part in plan.parts:
        memory = part.memory
        sizes = (
            memory.weights - memory.tables,
            memory.tables + memory.frozen,
            memory.gradients,
            memory.optimiser,
            memory.activations,
            memory.overhead,
            memory.total,
            part.machine.memory_nbytes,
        )
        style = "red" if part.missing_nbytes else None
        table.add_row(part.machine.name, _blocks(plan, part), *(f"{size / 1e9:.2f}" for size in sizes), style=style)
    for name in plan.spares:
        table.add_row(name, "spare", style="dim")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    return table


def _blocks(plan: Draft, part: Part) -> str:
    blocks = [block for segment in part.segments for block in plan.model.segments[segment]]
    if len(blocks) == 1:
        return str(blocks[0])
    return f"{blocks[0]}-{blocks[-1]}" if blocks[-1] - blocks[0] == len(blocks) - 1 else f"{len(blocks)} blocks"


def _speeds_table(plan: Draft) -> Table:
    """What each machine and line does."""
    table = _table("up / down", "TFLOP/s", "busy", "Mbps", "bytes/token", "MB a step", "line busy")
    for index, (part, busy) in enumerate(zip(plan.parts, plan.timeline.busy, strict=True)):
        machine = part.machine
        own = (f"{machine.flops / 1e12:.3g}", f"{busy / plan.timeline.seconds:.0%}")
        table.add_row(machine.name, *own, *_both_ways(plan, f"up {index}", f"down {index}", f"line {index}", machine))
    if plan.machines.hub is not None and len(plan.parts) > 1:
        table.add_row("the hub", "", "", *_both_ways(plan, "hub up", "hub down", "hub", plan.machines.hub))
    return table


def _both_ways(plan: Draft, up: str, down: str, shared: str, end: Machine | Hub) -> tuple[str, ...]:
    """One figure where both directions share a line."""
    nbytes, busy = plan.timeline.line_nbytes, plan.timeline.line_busy
    used = [shared] if shared in nbytes else [up, down]
    return (
        f"{_rate(end.up_bps)} / {_rate(end.down_bps)}",
        " / ".join(f"{nbytes[line] / plan.tokens_per_step:,.0f}" for line in used),
        " / ".join(f"{nbytes[line] / 1e6:.3g}" for line in used),
        " / ".join(f"{busy[line] / plan.timeline.seconds:.0%}" for line in used),
    )


def _rate(bits_per_second: float) -> str:
    return "no limit" if math.isinf(bits_per_second) else f"{bits_per_second / 1e6:,.4g}"


def _sentences(plan: Draft, cost: Bill) -> list[Text]:
    lines = []
    if len(plan.parts) > 1:
        lines.append(
            f"each boundary carries {plan.nbytes_per_token:,.0f} bytes a token both ways, "
            f"{plan.times_fewer_bytes:.1f} times fewer than dense bf16; its cost: "
            f"{say_gap(plan.model, plan.config.boundary, plan.times_fewer_bytes)}"
        )
        lines.append(f"machines wait for {plan.timeline.bubble:.0%} of their time")
    paid = f"{cost.money or 0:,.2f} {plan.machines.currency} for those that compute"
    money = "" if cost.money is None else f", {paid}"
    hours = f"{cost.hours:,.1f} hours" if cost.hours < 72 else f"{cost.hours / 24:,.1f} days"
    lines.append(f"{say_count(cost.tokens)} tokens: {hours}{money}")
    return [Text(line) for line in lines]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 90 else say_duration(seconds)


def as_table(plan: Draft, limit: str, changes: list[Change], cost: Bill) -> dict[str, Any]:
    """Everything, for `--json`."""
    seconds = plan.timeline.seconds
    return {
        "fits": plan.fits,
        "tokens_per_second": plan.tokens_per_second,
        "step_seconds": seconds,
        "tokens_per_step": plan.tokens_per_step,
        "bubble": plan.timeline.bubble,
        "machines": [
            {
                "name": part.machine.name,
                "segments": list(part.segments),
                "blocks": part.blocks,
                "parameters": part.parameters,
                "memory_nbytes": {
                    "weights": part.memory.weights,
                    "gradients": part.memory.gradients,
                    "optimiser": part.memory.optimiser,
                    "activations": part.memory.activations,
                    "frozen_tables": part.memory.frozen,
                    "overhead": part.memory.overhead,
                    "total": part.memory.total,
                    "available": part.machine.memory_nbytes,
                    "missing": part.missing_nbytes,
                },
                "token_tables_nbytes": part.memory.tables,
                "busy": busy / seconds,
            }
            for part, busy in zip(plan.parts, plan.timeline.busy, strict=True)
        ],
        "spares": list(plan.spares),
        "boundary": {
            "bytes_per_token": plan.nbytes_per_token,
            "times_fewer_than_dense_bf16": plan.times_fewer_bytes,
            "loss": say_gap(plan.model, plan.config.boundary, plan.times_fewer_bytes),
        },
        "lines": [
            {
                "line": plan.say(load),
                "bytes_per_step": plan.timeline.line_nbytes[line],
                "bytes_per_token": plan.timeline.line_nbytes[line] / plan.tokens_per_step,
                "busy": load.share,
            }
            for line, busy in plan.timeline.line_busy.items()
            for load in [load_of(line, busy / seconds)]
        ],
        "bottleneck": limit,
        "changes": [{"change": change.words, "times_as_fast": change.faster} for change in changes],
        "tokens": cost.tokens,
        "hours": cost.hours,
        "money": cost.money,
        "currency": plan.machines.currency,
        "settings": {
            "boundaries": list(plan.model.boundaries),
            "schedule": plan.config.parallelism.pipeline_parallel_schedule,
            "microbatch_size": plan.config.microbatch_size,
            "extra_microbatches": plan.config.parallelism.pipeline_parallel_extra_microbatches,
        },
        "assumptions": list(plan.assumptions),
    }
