"""Alternatives to a run of several machines: one of the machines without the others, or one rented card. A plan names
them with time and price, so that it says when friends are not worth it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.planning.fitting import ways_to_fit
from thinpipe.planning.machines import Machine, Machines
from thinpipe.planning.planner import Cost, Plan, estimate_cost, make_plan, memory_need
from thinpipe.planning.stored_model import StoredModel
from thinpipe.planning.streaming import stream_on

_HARDLY = 0.8
"""Share of the speed of a run of several machines from which one machine is hardly slower."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The run on a single machine."""

    machine: Machine
    rented: bool
    settings: tuple[str, ...]
    """Settings that differ from those of the plan, so that the run fits."""
    plan: Plan
    cost: Cost
    currency: str
    """Currency of the cost: assumed prices are in USD."""


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    streaming: Alternative | None = None
    """Of a published model that no machine of the plan can hold: the fastest of them with all state in its host's
    memory (`streaming.py`)."""
    one_machine: Alternative | None
    """The fastest of the plan's own machines that can hold the model by itself; None: there is none, or the plan has
    one machine."""
    rented: Alternative | None
    """The card for which the run costs least; None: no card of those known can hold the model by itself."""
    verdict: str
    """Whether several machines are worth it."""


def find_alternatives(plan: Plan, cost: Cost) -> Alternatives:
    """`cost`: that of the plan; the alternatives train on as many tokens."""
    own = [] if len(plan.machine_loads) == 1 else [*_on_each(plan, plan.machines.machines, cost, rented=False)]
    hired = [*_on_each(plan, plan.machines.rented, cost, rented=True)]
    fastest = max(own, key=lambda each: each.plan.tokens_per_second, default=None)
    streamed = [] if own or len(plan.machine_loads) == 1 else [*_streamed(plan, cost)]
    streaming = max(streamed, key=lambda each: each.plan.tokens_per_second, default=None)
    cheapest = min(hired, key=lambda each: (each.cost.money or 0.0, each.cost.hours), default=None)
    verdict = _verdict(plan, cost, fastest or streaming, cheapest)
    return Alternatives(one_machine=fastest, streaming=streaming, rented=cheapest, verdict=verdict)


def _streamed(plan: Plan, cost: Cost) -> Iterable[Alternative]:
    config = _in_one_process(plan.config)
    for machine in plan.machines.machines:
        made = stream_on(machine, config, plan.model) if isinstance(plan.model, StoredModel) else None
        if made is not None:
            yield Alternative(
                machine=machine,
                rented=False,
                settings=(),
                plan=made,
                cost=estimate_cost(made, cost.tokens),
                currency=plan.machines.currency,
            )


def _on_each(plan: Plan, machines: Iterable[Machine], cost: Cost, *, rented: bool) -> Iterable[Alternative]:
    """Alternatives on those machines that can hold the run, with the least harmful settings that fit."""
    config = _in_one_process(plan.config)
    currency = "USD" if rented and plan.machines.rented_price_assumed else plan.machines.currency
    for machine in machines:
        there = Machines(machines=(machine,))
        try:
            if memory_need(config, plan.model, there).fits:
                steps = []
            else:
                steps = ways_to_fit(config, partial(memory_need, model=plan.model, machines=there))
                if not steps or not steps[-1].need.fits:
                    continue
            made = make_plan(steps[-1].config if steps else config, plan.model, there)
        except UserError:
            continue
        yield Alternative(
            machine=machine,
            rented=rented,
            settings=tuple(step.saving.setting for step in steps),
            plan=made,
            cost=estimate_cost(made, cost.tokens),
            currency=currency,
        )


def _in_one_process(config: RunConfig) -> RunConfig:
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=1,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_shares=None,
        pipeline_parallel_extra_microbatches=0,
    )
    return replace(config, parallelism=parallelism, link=type(config.link)())


def _verdict(plan: Plan, cost: Cost, own: Alternative | None, hired: Alternative | None) -> str:
    if len(plan.machine_loads) == 1:
        return ""
    if not plan.fits:
        names = [each.machine.name for each in (own, hired) if each is not None]
        return f"these machines together cannot hold it, {' and '.join(names)} could" if names else ""
    share = own.plan.tokens_per_second / plan.tokens_per_second if own else 0.0
    if own and share >= 1:
        return f"friends are not worth it: {own.machine.name} without the others is {share:.2g} times as fast"
    if own and share >= _HARDLY:
        return f"friends are hardly worth it: {own.machine.name} without the others is {share:.0%} as fast"
    reason = (
        "no machine could hold it without the others"
        if own is None
        else f"{own.machine.name} without the others is {share:.0%} as fast"
    )
    if hired and hired.cost.hours < cost.hours and hired.cost.money is not None:
        comparable = hired.currency == plan.machines.currency
        saved = hired.cost.money - ((cost.money or 0.0) if comparable else 0.0)
        if saved <= 0:
            return f"friends are not worth it: a rented {hired.machine.name} is faster and costs less"
        return (
            f"friends are worth it if {saved:,.2f} {hired.currency} are worth more than "
            f"{cost.hours - hired.cost.hours:,.0f} hours of waiting for {len(plan.machine_loads)} machines; {reason}"
        )
    return f"friends are worth it: {reason}"
