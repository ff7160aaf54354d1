"""Reads the records of finished runs: losses by method and seed, each against the uncompressed run of its seed."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetune.runs import LR
from thinpipe.core.errors import UserError

ABOVE_ALL = math.inf
"""The loss of a run that diverged."""


@dataclass(frozen=True)
class Losses:
    """The last validation losses of one run."""

    on: float
    """With what training sends."""
    off: float
    """With states that cross whole."""

    @property
    def best(self) -> float:
        """What the training is worth: AQ-SGD, for one, has no use for compression of samples it has never seen."""
        return min(self.on, self.off)


class Results:
    def __init__(self, losses: Mapping[str, Mapping[int, Losses]], before: float) -> None:
        """`losses` by method and seed; `before` is the loss of the pretrained weights."""
        self.losses, self.before = losses, before

    def on(self, name: str) -> list[float]:
        return [losses.on for losses in self.losses.get(name, {}).values()]

    def off(self, name: str) -> list[float]:
        return [losses.off for losses in self.losses.get(name, {}).values()]

    def best(self, name: str) -> list[float]:
        return [losses.best for losses in self.losses.get(name, {}).values()]

    def off_minus_on(self, name: str) -> list[float]:
        """What it costs to switch compression off at inference."""
        return [difference(losses.off, losses.on) for losses in self.losses.get(name, {}).values()]

    def minus(self, name: str, other: str) -> list[float]:
        """Seed by seed, each at its better way of inference."""
        first, second = self.losses.get(name, {}), self.losses.get(other, {})
        return [difference(first[seed].best, second[seed].best) for seed in sorted(first.keys() & second.keys())]

    def cost(self, name: str) -> list[float]:
        """Against the uncompressed run, seed by seed, in nats."""
        return self.minus(name, "uncompressed")

    def share_lost(self, name: str) -> list[float]:
        """The cost as a share of what the uncompressed fine-tuning gained with the same seed: 1 is all of it."""
        whole, runs = self.losses.get("uncompressed", {}), self.losses.get(name, {})
        shared = sorted(whole.keys() & runs.keys())
        return [difference(runs[seed].best, whole[seed].best) / (self.before - whole[seed].best) for seed in shared]

    @property
    def gain(self) -> float:
        """Of the uncompressed fine-tuning, mean over seeds."""
        return self.before - mean(self.best("uncompressed"))


def difference(first: float, second: float) -> float:
    return 0.0 if first == second else first - second


def read_records(output: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Those of the fine-tunings, and that of the pretraining."""
    kept = {path.stem: json.loads(path.read_text()) for path in sorted((output / "records").glob("*.json"))}
    pretraining = kept.pop("pretraining", None)
    if pretraining is None:
        raise UserError(f"there are no finished runs in {output}: python -m benchmarks.finetune run --data TOKENS")
    strangers = [key for key, run in kept.items() if run["initial_sha256"] != pretraining["initial_sha256"]]
    if strangers:
        raise UserError(f"{strangers[0]} started from other weights than {output} says: remove its record, run again")
    return list(kept.values()), pretraining


def results_of(records: Iterable[Mapping[str, Any]], before: float) -> Results:
    losses: dict[str, dict[int, Losses]] = defaultdict(dict)
    for kept in sorted(records, key=lambda kept: int(kept["seed"])):
        if kept["lr"] == LR:
            on, off = (ABOVE_ALL if kept[side] is None else float(kept[side]) for side in ("on", "off"))
            losses[kept["name"]][int(kept["seed"])] = Losses(on, off)
    return Results(losses, before)
