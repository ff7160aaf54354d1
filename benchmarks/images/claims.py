"""The findings of arXiv 2401.07788, each with our figures and a verdict that follows from them.

One thing is worse than another only if it is so for every pair of seeds: with fewer right answers, or, where the ranges
of the two overlap, with a higher loss. Anything else is no evidence. A claim about many strengths is reproduced if at
least half of them speak for it and none against, and refuted if it is the other way round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from benchmarks.images.settings import BITS, KEPT, KEPT_WITH_MEMORY, UNCOMPRESSED, Memory, Setting
from benchmarks.images.training import Outcome, Score

Verdict = Literal["reproduced", "refuted", "not decided"]
BADLY = 2.0
"""A compression hurts badly when it makes so many times the errors of none (or the loss, if errors do not decide)."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of one setting, seed by seed."""

    errors: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Self:
        scores = list(scores)
        return cls(errors=tuple(1 - each.accuracy for each in scores), losses=tuple(each.loss for each in scores))

    @property
    def measures(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What decides, and what decides if that does not."""
        return self.errors, self.losses

    @property
    def error(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def minus(self, other: "Scores") -> "Scores":
        """Seed by seed."""
        errors, losses = (
            tuple(mine - theirs for mine, theirs in zip(*pair, strict=True))
            for pair in zip(self.measures, other.measures, strict=True)
        )
        return Scores(errors=errors, losses=losses)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Both ways to test every setting."""

    on: Mapping[Setting, Scores]
    off: Mapping[Setting, Scores]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Self:
        """Of settings that have the same seeds."""
        by_setting: dict[Setting, list[Outcome]] = {}
        for outcome in sorted(outcomes, key=lambda each: each.seed):
            by_setting.setdefault(outcome.setting, []).append(outcome)
        return cls(
            on={setting: Scores.of(each.on for each in found) for setting, found in by_setting.items()},
            off={setting: Scores.of(each.off for each in found) for setting, found in by_setting.items()},
        )

    def better(self, setting: Setting) -> Scores:
        """Tested in the way that suits it."""
        return min((self.on[setting], self.off[setting]), key=lambda scores: scores.loss)


def worse(one: Scores, other: Scores) -> bool | None:
    """Whether `one` is; False: it is better; None: within the spread of the seeds."""
    for mine, theirs in zip(one.measures, other.measures, strict=True):
        if min(mine) > max(theirs):
            return True
        if max(mine) < min(theirs):
            return False
    return None


def hurts_badly(scores: Scores, uncompressed: Scores) -> bool | None:
    limits = Scores(
        errors=tuple(BADLY * error for error in uncompressed.errors),
        losses=tuple(BADLY * loss for loss in uncompressed.losses),
    )
    return worse(scores, limits)


def verdict(votes: Sequence[bool | None]) -> Verdict:
    approving, refusing = votes.count(True), votes.count(False)
    if 2 * approving >= len(votes) and not refusing:
        return "reproduced"
    if 2 * refusing >= len(votes) and not approving:
        return "refuted"
    return "not decided"


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    figures: str
    verdict: Verdict


def comparison(text: str, legend: str, pairs: Mapping[str, tuple[Scores, Scores]]) -> Claim:
    """The claim that the first of each pair is worse than the second."""
    votes = {level: worse(*pair) for level, pair in pairs.items()}
    marks = {True: "for", False: "against", None: "open"}
    figures = "<br>".join(
        f"{level}: {_figures(one)} / {_figures(other)} {marks[votes[level]]}" for level, (one, other) in pairs.items()
    )
    return Claim(text=text, figures=f"{legend}<br>{figures}", verdict=verdict(list(votes.values())))


def floor(text: str, levels: Mapping[float, Scores], claimed: float, uncompressed: Scores) -> Claim:
    """The claim that this level does not hurt badly and the next stronger one does."""
    stronger = max(level for level in levels if level < claimed)
    badly = {level: hurts_badly(scores, uncompressed) for level, scores in levels.items()}
    marks = {True: "bad", False: "not bad", None: "open"}
    figures = "<br>".join(f"{level:.0%}: {_figures(scores)} {marks[badly[level]]}" for level, scores in levels.items())
    ruling: Verdict = "not decided"
    if badly[claimed] is False and badly[stronger] is True:
        ruling = "reproduced"
    elif badly[claimed] is True or badly[stronger] is False:
        ruling = "refuted"
    return Claim(text=text, figures=f"none: {_figures(uncompressed)}<br>{figures}", verdict=ruling)


def claims(results: Results) -> list[Claim]:
    on, off, none = results.on, results.off, results.on[UNCOMPRESSED]
    topk, quantised = Setting(kind="topk"), Setting(kind="quantise")

    def gradients_against_activations(setting: Setting) -> tuple[Scores, Scores]:
        return on[replace(setting, where="gradients")], on[replace(setting, where="activations")]

    plain = {keep: replace(topk, level=keep) for keep in KEPT}
    found = [
        comparison(
            "Gradients need milder compression than activations: quantisation",
            "gradients / activations",
            {bits.level_name: gradients_against_activations(bits) for bits in _levels(quantised, BITS)},
        ),
        comparison(
            "Gradients need milder compression than activations: TopK",
            "gradients / activations",
            {keep.level_name: gradients_against_activations(keep) for keep in plain.values()},
        ),
        floor(
            "K = 10 % is the lowest TopK that does not hurt badly",
            {keep: on[setting] for keep, setting in plain.items()},
            0.1,
            none,
        ),
        comparison(
            "A model trained with TopK works well only if compression stays on at inference",
            "off / on",
            {setting.level_name: (off[setting], on[setting]) for setting in plain.values()},
        ),
        comparison(
            "The backward pass should reuse the forward mask",
            "own / shared mask",
            {s.level_name: (on[s], on[replace(s, where="both, one mask")]) for s in plain.values()},
        ),
    ]
    feedbacks: dict[Memory, str] = {"ef": "EF", "ef21": "EF21"}
    for memory, name in feedbacks.items():
        pairs = {plain[s.level]: s for s in _levels(replace(topk, memory=memory), KEPT_WITH_MEMORY)}
        found += [
            comparison(
                f"Error feedback does not help training: {name}",
                f"{memory} / plain, each tested in its better way",
                {s.level_name: (results.better(with_it), results.better(s)) for s, with_it in pairs.items()},
            ),
            comparison(
                f"Error feedback lets compression be switched off at inference: {name}",
                f"off minus on: plain / {memory}",
                {s.level_name: (off[s].minus(on[s]), off[w].minus(on[w])) for s, w in pairs.items()},
            ),
        ]
    aqsgd = _levels(replace(topk, memory="aqsgd"), KEPT_WITH_MEMORY)
    kept = {setting.level: results.better(setting) for setting in aqsgd}
    return [*found, floor("TopK with AQ-SGD hurts badly below 30 %", kept, 0.3, none)]


def _levels(setting: Setting, levels: Sequence[float]) -> list[Setting]:
    return [replace(setting, level=level) for level in levels]


def _figures(scores: Scores) -> str:
    return f"{scores.error:.1%} ({scores.loss:.2f})"
