"""Hours and money to a number of tokens. Everybody who computes is paid for the whole time."""

from dataclasses import dataclass

from thinpipe.plan.draft import Draft


@dataclass(frozen=True, kw_only=True)
class Bill:
    tokens: int
    hours: float
    money: float | None
    """None: no machine has a price."""


def bill(plan: Draft, tokens: int | None = None) -> Bill:
    """`tokens`: those of the run, if it is not said."""
    count = plan.config.training.steps * plan.tokens_per_step if tokens is None else tokens
    hours = count / plan.tokens_per_second / 3600
    price = sum(part.machine.price_per_hour for part in plan.parts)
    return Bill(tokens=count, hours=hours, money=price * hours if price else None)
