"""The second paper's claims, each decided by a rule from the runs it rests on, which have `SEEDS` seeds each.

- A difference is *decided* when it has the same sign with every seed and its mean is beyond MARGIN.
- A method hurts *badly* when it loses more than BADLY of what the uncompressed fine-tuning gained, with every seed.
- *Almost no* drop is at most ALMOST_NONE of that gain, with every seed.

Where seeds disagree, or runs are missing, nothing is decided. A run counts with the better of its two ways of
inference, compression on or off, unless the claim is about these.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from benchmarks.finetune.results import Results
from benchmarks.finetune.runs import SEEDS

MARGIN = 0.01
BADLY, ALMOST_NONE = 0.5, 0.1
PLAIN = "topk 10% both, mask reused"

Verdict = Literal["reproduced", "refuted", "not decided"]


@dataclass(frozen=True)
class Claim:
    text: str
    figures: str
    verdict: Verdict


def claims(results: Results) -> Iterator[Claim]:
    yield gradients_against_states(results, "TopK", ("topk 10%",))
    yield gradients_against_states(results, "quantisation", ("quantise 4 bit", "quantise 2 bit"))
    yield lowest_share(
        results, "K = 10 % is the lowest TopK that does not hurt badly", "topk {} both, mask reused", ("10%", "5%")
    )
    yield needs_compression_at_inference(results, PLAIN)
    for memory in ("EF", "EF21"):
        yield feedback_does_not_help(results, memory)
        yield feedback_frees_inference(results, memory)
    yield lowest_share(results, "TopK with AQ-SGD hurts badly below 30 %", "topk {} AQ-SGD", ("30%", "20%"))
    yield mask_should_be_reused(results)


def gradients_against_states(results: Results, what: str, pairs: Sequence[str]) -> Claim:
    """The same compression of gradients only and of states only; pairs that differ by less than MARGIN say nothing."""
    differences = {pair: results.minus(f"{pair} gradients", f"{pair} states") for pair in pairs}
    costs = {name: spread(results.cost(name)) for pair in pairs for name in (f"{pair} gradients", f"{pair} states")}
    figures = ", ".join(f"{name} {cost}" for name, cost in costs.items())
    signs = {sign for values in differences.values() if (sign := decided(values))}
    whole = all(len(values) == len(SEEDS) for values in differences.values())
    verdict = _by_sign(signs.pop() if len(signs) == 1 and whole else 0)
    return Claim(f"Gradients need milder compression than activations: {what}", figures, verdict)


def lowest_share(results: Results, text: str, pattern: str, shares: tuple[str, str]) -> Claim:
    """The first of the two shares must not hurt badly, the second must."""
    fine, bad = (is_bad(results.share_lost(pattern.format(share))) for share in shares)
    known = [share for share in ("50%", "30%", "20%", "10%", "5%") if results.on(pattern.format(share))]
    figures = ", ".join(f"{share}: {spread(results.share_lost(pattern.format(share)), '.0%')}" for share in known)
    if fine is False and bad is True:
        verdict: Verdict = "reproduced"
    else:
        verdict = "refuted" if fine is True or bad is False else "not decided"
    return Claim(text, f"share of the gain lost: {figures or 'missing'}", verdict)


def needs_compression_at_inference(results: Results, name: str) -> Claim:
    values = results.off_minus_on(name)
    figures = f"{name}, off minus on: {spread(values)}"
    text = "A model trained with TopK works well only if compression stays on at inference"
    return Claim(text, figures, _by_sign(decided(values)))


def feedback_does_not_help(results: Results, memory: str) -> Claim:
    values = results.minus(f"topk 10% {memory}", PLAIN)
    figures = f"minus TopK 10 % without it: {spread(values)}"
    verdict: Verdict = "not decided"
    if len(values) == len(SEEDS):
        verdict = "refuted" if decided(values) < 0 else "reproduced"
    return Claim(f"Error feedback does not help training: {memory}", figures, verdict)


def feedback_frees_inference(results: Results, memory: str) -> Claim:
    name = f"topk 10% {memory}"
    values = results.off_minus_on(name)
    figures = (
        f"off minus on: {spread(values)}, without feedback {spread(results.off_minus_on(PLAIN))}; loss "
        f"{average(results.on(name))} on, {average(results.off(name))} off"
    )
    large = _every(values, lambda value: value > ALMOST_NONE * results.gain)
    verdict: Verdict = "not decided" if large is None else "refuted" if large else "reproduced"
    return Claim(f"With error feedback, inference without compression costs almost nothing: {memory}", figures, verdict)


def mask_should_be_reused(results: Results) -> Claim:
    values = results.minus("topk 10% both, own masks", PLAIN)
    text = "The backward pass should reuse the forward mask (and sends no positions)"
    return Claim(text, f"TopK 10 %, own masks minus reused: {spread(values)}", _by_sign(decided(values)))


def decided(differences: Sequence[float]) -> int:
    """1 or -1, or 0 where the seeds do not decide."""
    if len(differences) < len(SEEDS) or abs(mean(differences)) <= MARGIN:
        return 0
    if all(value > 0 for value in differences):
        return 1
    return -1 if all(value < 0 for value in differences) else 0


def is_bad(shares_lost: Sequence[float]) -> bool | None:
    return _every(shares_lost, lambda share: share > BADLY)


def _every(values: Sequence[float], holds: Callable[[float], bool]) -> bool | None:
    """None where seeds are missing or disagree."""
    answers = {holds(value) for value in values}
    return answers.pop() if len(values) == len(SEEDS) and len(answers) == 1 else None


def _by_sign(sign: int) -> Verdict:
    return "not decided" if not sign else "reproduced" if sign > 0 else "refuted"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The mean, and half the distance between the least and the largest."""
    if not values:
        return "missing"
    if not all(map(math.isfinite, values)):
        return "diverged"
    middle = format(mean(values), f"+{form}")
    return middle if len(values) == 1 else f"{middle} ± {(max(values) - min(values)) / 2:{form}}"


def average(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" if values else "missing"
