"""Reads the records of finished runs: losses by method and seed, and the evidence they are for the paper's claims."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.finetune.runs import KEPT, KEPT_WITH, LR, RESTED_ON, topk_name
from benchmarks.lossy_claims import MASKS, Evidence, Levels
from benchmarks.verdicts import Judge, Measured
from thinpipe.core.errors import UserError

ABOVE_ALL = math.inf
"""The loss of a run that diverged."""


class Losses(NamedTuple):
    """The last validation losses of one run."""

    on: float
    """With what training sends."""
    off: float
    """With states that cross whole."""


class Results:
    def __init__(self, losses: Mapping[str, Mapping[int, Losses]], before: float) -> None:
        """`losses` by method and seed; `before` is the loss of the pretrained weights."""
        self.losses, self.before = losses, before

    def measured(self, name: str) -> Measured:
        found = self.losses.get(name, {})
        seeds = sorted(found)
        return Measured(on=tuple(found[seed].on for seed in seeds), off=tuple(found[seed].off for seed in seeds))

    def off_minus_on(self, name: str) -> list[float]:
        """What it costs to switch compression off at inference. Not a number where both diverged."""
        measured = self.measured(name)
        return [off - on for off, on in zip(measured.off, measured.on, strict=True)]

    def cost(self, name: str) -> list[float]:
        """Against the uncompressed run, seed by seed, in nats, each at its better way of inference."""
        runs, whole = self.losses.get(name, {}), self.losses.get("uncompressed", {})
        return [min(runs[seed]) - min(whole[seed]) for seed in sorted(runs.keys() & whole.keys())]

    @property
    def judge(self) -> Judge:
        return Judge(before=self.before, uncompressed=mean(self.measured("uncompressed").best))

    @property
    def gain(self) -> float:
        """Of the uncompressed fine-tuning, mean over seeds."""
        return self.judge.before - self.judge.uncompressed

    @property
    def evidence(self) -> Evidence:
        """Of the strengths that have several seeds."""
        shares, bits = {keep: f"topk {keep:.0%}" for keep in KEPT}, {n: f"quantise {n} bit" for n in (8, 4, 2)}
        return Evidence(
            topk_gradients=self.levels({keep: f"{name} gradients" for keep, name in shares.items()}),
            topk_activations=self.levels({keep: f"{name} states" for keep, name in shares.items()}),
            quantised_gradients=self.levels({n: f"{name} gradients" for n, name in bits.items()}),
            quantised_activations=self.levels({n: f"{name} states" for n, name in bits.items()}),
            topk={masks: self.levels({keep: topk_name(keep, masks) for keep in KEPT}) for masks in MASKS},
            feedbacks={
                (feedback, masks): self.levels({keep: topk_name(keep, masks, feedback) for keep in kept})
                for feedback, kept in KEPT_WITH.items()
                for masks in MASKS
            },
        )

    def levels(self, names: Mapping[float, str]) -> Levels:
        return {level: self.measured(name) for level, name in names.items() if name in RESTED_ON}


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
    for kept in records:
        if kept["lr"] == LR:
            on, off = (ABOVE_ALL if kept[side] is None else float(kept[side]) for side in ("on", "off"))
            losses[kept["name"]][int(kept["seed"])] = Losses(on, off)
    return Results(losses, before)
