"""What a row of bases does: distances, the spectrum of UᵀU, and a word for how U moves. Trains and draws nothing.

Distances between two bases are the root mean square of the sines of their principal angles: 0 for the same subspace, 1
for orthogonal ones, sqrt(1 - K/D) for random ones.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch

from thinpipe.report.summary import summarise
from thinpipe.subspace import Basis
from thinpipe.subspace.grassmann import principal_angles

LAGS = (1, 2, 5, 10)
"""Updates apart."""
SETTLED, UNRELATED = 0.05, 0.9
"""Nearer than this to each other, however many updates apart; as far as this share of the distance of random bases."""
STRAIGHT, WANDERING = 0.75, 0.25
"""Least growth exponents; see `movement`."""
CALMER = 0.5
"""Steps of the last quarter over those of the first, at most, where U comes to rest."""

Change = Mapping[str, Any]
"""What is known of one change of basis."""


def distance(first: Basis, second: Basis) -> float:
    return float(principal_angles(first.matrix_DK, second.matrix_DK).sin().square().mean().sqrt())


def random_distance(dim: int, width: int) -> float:
    """What two random bases are apart."""
    return math.sqrt(1 - width / dim)


def spectrum(basis: Basis) -> dict[str, Any]:
    """Of UᵀU, whose eigenvalues should all be 1."""
    matrix_DK = basis.matrix_DK.double()
    excess_K = torch.linalg.eigvalsh(matrix_DK.T @ matrix_DK) - 1
    return {"eigenvalues_minus_1": excess_K.tolist(), "gram_error": float(excess_K.abs().max())}


def distances(bases: Sequence[Basis]) -> dict[str, Any]:
    """From the last one to earlier ones."""
    last = bases[-1]
    return {
        "to_first": distance(bases[0], last),
        "angles": principal_angles(bases[-2].matrix_DK, last.matrix_DK).tolist(),
        "apart": {str(lag): distance(bases[-1 - lag], last) for lag in LAGS if lag < len(bases)},
    }


def by_lag(changes: Sequence[Change]) -> dict[int, float]:
    """Mean distance of bases that are this many updates apart, in the second half of the run."""
    later = changes[len(changes) // 2 :]
    known = {lag: [change["apart"][str(lag)] for change in later if str(lag) in change["apart"]] for lag in LAGS}
    return {lag: mean(values) for lag, values in known.items() if values}


def comes_to_rest(changes: Sequence[Change], growth: float) -> bool:
    """Its steps shrink, or lead nowhere. Small steps alone are no rest: they may go on for ever."""
    first, last = quarters([change["apart"]["1"] for change in changes])
    return last < CALMER * first or growth < WANDERING


def movement(changes: Sequence[Change], random: float) -> tuple[str, float]:
    """What U does, in a word, and p where distances grow as lag^p: 1 straight on, 1/2 a random walk, 0 back and forth.

    It overshoots when two updates bring it nearer to where it was than one does. Where ten lead as far as random bases
    are from each other, it forgets, and p says nothing: there is no further. It settles when it is near to where it was
    ten updates ago and comes to rest.
    """
    apart = by_lag(changes)
    (near, before), (far, after) = min(apart.items()), max(apart.items())
    known = far > near and before > 0 and after > 0
    growth = math.log(after / before) / math.log(far / near) if known else 0.0
    if max(apart.values()) < SETTLED and comes_to_rest(changes, growth):
        return "settles", growth
    if apart.get(2, math.inf) < apart[1]:
        return "overshoots", growth
    if after > UNRELATED * random:
        return "forgets", growth
    if growth >= STRAIGHT:
        return "moves on", growth
    return ("wanders" if growth >= WANDERING else "turns back"), growth


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last."""
    quarter = max(1, len(values) // 4)
    return mean(values[:quarter]), mean(values[-quarter:])


def read_changes(path: Path) -> list[Change]:
    """Of a finished run: the folder it was trained in, or its record."""
    if path.is_dir():
        return [msgspec.to_builtins(event) for event in summarise(path).basis_changes]
    changes: list[Change] = json.loads(path.read_text())["basis_changes"]
    return changes


def summary(changes: Sequence[Change], random: float | None) -> dict[str, Any]:
    """First and last quarter of a run, and the whole of it."""

    def ends(name: str) -> tuple[float, float]:
        return quarters([float(change[name]) for change in changes])

    costs = [
        change["loss_after"] - change["loss_before"]
        for change in changes
        if change["loss_after"] is not None and change["loss_before"] is not None
    ]
    found: dict[str, Any] = {
        "updates": len(changes),
        "captured_energy": ends("captured_energy"),
        "mean_angle_degrees": tuple(map(math.degrees, ends("mean_angle"))),
        "kept_norm": ends("kept_norm"),
        "kept_of_all": math.prod(change["kept_norm"] for change in changes),
        "loss_added_by_a_change": mean(costs) if costs else None,
    }
    if random is not None:
        word, growth = movement(changes, random)
        found |= {
            "best_energy": ends("best_energy"),
            "largest_gram_error": max(change["gram_error"] for change in changes),
            "to_first": changes[-1]["to_first"],
            "apart": by_lag(changes),
            "movement": word,
            "growth": growth,
        }
    return found


def table(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """First quarter → last quarter."""
    yield "| run | updates | captured energy | best possible | angle, degrees | kept norm | loss added | UᵀU - 1 | U |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for name, of in summaries.items():
        best = "{:.2f} → {:.2f}".format(*of["best_energy"]) if "best_energy" in of else ""
        error = f"{of['largest_gram_error']:.0e}" if "largest_gram_error" in of else ""
        word = f"{of['movement']} (p = {of['growth']:.2f})" if "movement" in of else ""
        added = of["loss_added_by_a_change"]
        yield (
            f"| {name} | {of['updates']} | {{:.2f}} → {{:.2f}} | {best} | {{:.1f}} → {{:.1f}} | {{:.3f}} → {{:.3f}} | "
            f"{'' if added is None else f'{added:+.4f}'} | {error} | {word} |"
        ).format(*of["captured_energy"], *of["mean_angle_degrees"], *of["kept_norm"])
