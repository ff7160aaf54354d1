"""Reads the records of finished runs and compares each with the dense run of its seed and tokens."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

CONTROL = "control"
"""Question of runs in another precision than the other runs of their names: compared among themselves only."""


@dataclass(frozen=True)
class Result:
    question: str
    name: str
    lr: float
    seed: int
    tokens: int
    bytes_per_token: float
    trainable: int
    boundaries: int
    validations: list[dict[str, float]]
    diverged: bool

    @property
    def loss(self) -> float:
        return self.validations[-1]["loss"] if self.validations and not self.diverged else float("inf")

    @property
    def bits_per_byte(self) -> float:
        return self.validations[-1]["bits_per_byte"]


@dataclass(frozen=True)
class Gap:
    """How much worse than dense, token for token."""

    nats: float
    percent: float
    bits_per_byte: float

    @classmethod
    def between(cls, point: Mapping[str, float], dense: Mapping[str, float]) -> Self:
        """Of two validations."""
        nats = point["loss"] - dense["loss"]
        return cls(nats, 100 * nats / dense["loss"], point["bits_per_byte"] - dense["bits_per_byte"])


def read_results(output: Path) -> list[Result]:
    """Results of all questions but the control."""
    return [result for result in _read_all(output) if result.question != CONTROL]


def read_control(output: Path) -> list[Result]:
    return [result for result in _read_all(output) if result.question == CONTROL]


def _read_all(output: Path) -> list[Result]:
    results = []
    for path in sorted((output / "records").glob("*.json")):
        kept = json.loads(path.read_text())
        names = [field.name for field in fields(Result) if field.name != "diverged"]
        ends_well = kept["ended"] == "finished" and kept["validations"][-1]["tokens"] == kept["tokens"]
        results.append(Result(**{name: kept[name] for name in names}, diverged=not ends_well))
    return results


def best_of_learning_rates(results: Iterable[Result]) -> list[Result]:
    """One for each name, number of tokens and seed: the one that ends lowest, whatever question it was run for."""
    by_name: dict[tuple[str, int, int], list[Result]] = defaultdict(list)
    for result in results:
        by_name[result.name, result.tokens, result.seed].append(result)
    return [min(same, key=lambda result: result.loss) for same in by_name.values()]


class Dense:
    """The runs that all others are compared with: for tokens and seed, the best of the learning rates."""

    def __init__(self, results: Iterable[Result], name: str = "dense") -> None:
        self._best = {
            (result.tokens, result.seed): result
            for result in best_of_learning_rates(result for result in results if result.name == name)
        }

    def has(self, result: Result) -> bool:
        return (result.tokens, result.seed) in self._best

    def of(self, result: Result) -> Result:
        return self._best[result.tokens, result.seed]

    def gap(self, result: Result) -> Gap:
        return Gap.between(result.validations[-1], self.of(result).validations[-1])

    def gaps_over_tokens(self, result: Result) -> dict[int, Gap]:
        """At every validation that both have."""
        dense = {int(point["tokens"]): point for point in self.of(result).validations}
        return {
            int(point["tokens"]): Gap.between(point, dense[int(point["tokens"])])
            for point in result.validations
            if int(point["tokens"]) in dense
        }

    def percent_over_tokens(self, result: Result) -> list[tuple[int, float]]:
        return [(tokens, gap.percent) for tokens, gap in self.gaps_over_tokens(result).items()]


Compared = tuple[Result, float]
"""A run, and how many per cent its loss is above that of its dense run."""


def compared(results: Iterable[Result], dense: Dense) -> list[Compared]:
    """The best of the learning rates."""
    best = [result for result in best_of_learning_rates(results) if dense.has(result) and not result.diverged]
    return [(result, dense.gap(result).percent) for result in best]
