"""How the studies of arXiv 2401.07788 come to a verdict: one rule and one table for all of them. Knows no method.

Losses are turned into the share of the gain that was lost: 0 is the uncompressed training, 1 what there was before it.
So one rule fits an image classifier that learns from nothing and a language model that is fine-tuned. RULES says it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal, NamedTuple

SEEDS_NEEDED = 3
MARGIN = 0.01
"""Of the gain. Differences below it are none."""
BADLY = 0.25
"""Of the gain. Where it stands is a choice, so every verdict is also given for half and for double of it."""
NO_DIFFERENCE, NOT_FINITE = "no difference", "not finite"

RULES = (
    "Every loss counts as the share of the gain it lost: 0 % is the mean of the uncompressed runs, 100 % the loss "
    "before training. One configuration is *worse* than another if every seed of it is above every seed of the other, "
    f"and their means lie more than {MARGIN:.0%} apart; *better* is the reverse, and all else is *no difference*. It "
    f"hurts *badly* if it loses more than {BADLY:.0%} with every seed. A claim about several strengths is reproduced "
    "if at least half of them speak for it and none against, and refuted if it is the other way round. Nothing is "
    f"decided by fewer than {SEEDS_NEEDED} seeds, nor by a loss that is not finite."
)


class Finding(NamedTuple):
    """The answer to one question about one strength."""

    holds: bool | None
    """None: the runs say neither."""
    words: str


@dataclass(frozen=True)
class Verdict:
    ruling: Literal["reproduced", "refuted", "not decided"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.ruling}: {self.why}" if self.why else self.ruling


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    configuration: str
    """What was compressed, and how."""
    figures: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The losses of one configuration, seed by seed, with its compression at inference and without."""

    on: tuple[float, ...] = ()
    off: tuple[float, ...] = ()

    @property
    def best(self) -> tuple[float, ...]:
        """What the training is worth: AQ-SGD, for one, has no use for compression of samples it has never seen."""
        return tuple(map(min, self.on, self.off))


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Knows what there was to gain. All it is asked about are losses, seed by seed."""

    before: float
    uncompressed: float
    badly: float = BADLY

    def lost(self, losses: Iterable[float]) -> tuple[float, ...]:
        """Shares of the gain. Where nothing was gained there is no share: not a number."""
        gain = self.before - self.uncompressed
        return tuple((loss - self.uncompressed) / gain if gain > 0 else math.nan for loss in losses)

    def worse(self, first: Sequence[float], second: Sequence[float]) -> Finding:
        one, other = self.lost(first), self.lost(second)
        if words := gap(one, other):
            return Finding(None, words)
        apart = mean(one) - mean(other)
        if min(one) > max(other) and apart > MARGIN:
            return Finding(True, "worse")
        if max(one) < min(other) and apart < -MARGIN:
            return Finding(False, "better")
        return Finding(None, NO_DIFFERENCE)

    def not_better(self, first: Sequence[float], second: Sequence[float]) -> Finding:
        """No difference is enough: what makes no difference does not help."""
        finding = self.worse(first, second)
        return Finding(True, NO_DIFFERENCE) if finding.words == NO_DIFFERENCE else finding

    def hurts_badly(self, losses: Sequence[float]) -> Finding:
        return self.above(self.badly, self.lost(losses), "bad", "not bad")

    def above(self, bar: float, shares: Sequence[float], yes: str, no: str) -> Finding:
        if words := gap(shares):
            return Finding(None, words)
        answers = {share > bar for share in shares}
        if len(answers) > 1:
            return Finding(None, "seeds disagree")
        return Finding(True, yes) if answers.pop() else Finding(False, no)

    def show(self, losses: Sequence[float]) -> str:
        return spread(self.lost(losses), ".1%")


def gap(*samples: Sequence[float]) -> str:
    """Why these decide nothing; empty if they may."""
    fewest = min(map(len, samples))
    if fewest < SEEDS_NEEDED:
        return f"{fewest} of {SEEDS_NEEDED} seeds"
    return "" if all(math.isfinite(value) for sample in samples for value in sample) else NOT_FINITE


def tally(findings: Iterable[Finding]) -> Verdict:
    """Of a claim about several strengths, from whether it holds at each."""
    found = list(findings)
    answers = [finding.holds for finding in found]
    approving, refusing = answers.count(True), answers.count(False)
    if approving and refusing:
        return Verdict("not decided", "strengths disagree")
    if approving and 2 * approving >= len(found):
        return Verdict("reproduced")
    if refusing and 2 * refusing >= len(found):
        return Verdict("refuted")
    return Verdict("not decided", ", ".join(dict.fromkeys(each.words for each in found if each.holds is None)))


def at_every_strength(findings: Mapping[str, Finding], shown: Mapping[str, str]) -> tuple[str, Verdict]:
    """Figures with the word for each, and the verdict."""
    figures = "<br>".join(f"{level}: {shown[level]}: {finding.words}" for level, finding in findings.items())
    return figures, tally(findings.values())


def lowest(findings: Mapping[float, Finding], claimed: float) -> Verdict:
    """Whether `claimed` is the lowest level that does not hurt badly; `findings` say which do."""
    fine, bad = findings[claimed], findings[max(level for level in findings if level < claimed)]
    if fine.holds is False and bad.holds is True:
        return Verdict("reproduced")
    if fine.holds is True:
        return Verdict("refuted")
    if fine.holds is None or bad.holds is None:
        return Verdict("not decided", (fine if fine.holds is None else bad).words)
    if not any(finding.holds for finding in findings.values()):
        return Verdict("not decided", "nothing hurts badly here")
    return Verdict("refuted")


def claim_table(judge: Judge, claims: Callable[[Judge], Sequence[Claim]]) -> Iterator[str]:
    """In markdown, with the verdicts that other bars for "badly" would have given."""
    bars = (judge.badly, judge.badly / 2, judge.badly * 2)
    rulings = zip(*(claims(replace(judge, badly=bar)) for bar in bars), strict=True)
    yield f"| claim | configuration | figures | verdict | if badly were {bars[1]:.1%} | {bars[2]:.1%} |"
    yield "|---|---|---|---|---|---|"
    for claim, *others in rulings:
        same = ("the same" if other.verdict == claim.verdict else str(other.verdict) for other in others)
        cells = (claim.text, claim.configuration, claim.figures, f"**{claim.verdict}**", *same)
        yield f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The mean, and half the distance between the least and the largest."""
    if not values:
        return "missing"
    if not all(map(math.isfinite, values)):
        return NOT_FINITE
    middle = format(mean(values), f"+{form}")
    return middle if len(values) == 1 else f"{middle} ± {(max(values) - min(values)) / 2:{form}}"
