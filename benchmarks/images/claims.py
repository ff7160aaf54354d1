"""What the trainings say, setting by setting, and the evidence they are for the claims of arXiv 2401.07788."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from benchmarks.digits import CLASSES
from benchmarks.images.settings import BITS, KEPT, UNCOMPRESSED, Feedback, Setting, Where, kept_with
from benchmarks.images.training import Outcome, Score
from benchmarks.lossy_claims import Evidence, Levels, Masks
from benchmarks.lossy_claims import Feedback as Name
from benchmarks.verdicts import Judge, Measured

BEFORE = math.log(CLASSES)
"""The loss of a guess."""
MASKS: dict[Masks, Where] = {"own masks": "both", "mask reused": "both, one mask"}
NAMES: dict[Feedback, Name] = {"ef": "EF", "ef21": "EF21", "aqsgd": "AQ-SGD"}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of one setting, seed by seed. A loss that is not finite is infinite."""

    errors: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Self:
        scores = list(scores)
        return cls(
            errors=tuple(1 - each.accuracy for each in scores),
            losses=tuple(math.inf if each.loss is None else each.loss for each in scores),
        )

    @property
    def error(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


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

    @property
    def judge(self) -> Judge:
        return Judge(before=BEFORE, uncompressed=self.on[UNCOMPRESSED].loss)

    @property
    def evidence(self) -> Evidence:
        topk, quantised = Setting(kind="topk"), Setting(kind="quantise")
        return Evidence(
            topk_gradients=self.levels(replace(topk, where="gradients"), KEPT),
            topk_activations=self.levels(replace(topk, where="activations"), KEPT),
            quantised_gradients=self.levels(replace(quantised, where="gradients"), BITS),
            quantised_activations=self.levels(replace(quantised, where="activations"), BITS),
            topk={masks: self.levels(replace(topk, where=where), KEPT) for masks, where in MASKS.items()},
            feedbacks={
                (name, masks): self.levels(replace(topk, feedback=feedback, where=where), kept_with(feedback, where))
                for feedback, name in NAMES.items()
                for masks, where in MASKS.items()
            },
        )

    def levels(self, setting: Setting, levels: Sequence[float]) -> Levels:
        settings = {level: replace(setting, level=level) for level in levels}
        return {level: Measured(on=self.on[each].losses, off=self.off[each].losses) for level, each in settings.items()}
