"""The table of what each boundary costs, from nothing but the records of finished runs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tuning_boundaries.runs import BASE_LR, BOUNDARIES, FULL, LR, SEEDS, SEQ_LEN, WHOLE, Tuning
from benchmarks.verdicts import spread
from thinpipe.core.errors import UserError

Record = Mapping[str, Any]


class Results:
    """Losses by name and seed, at the learning rate of the study; a run that diverged has an infinite one."""

    def __init__(self, records: Sequence[Record], base: Record) -> None:
        self.base, self.records = base, records
        self.losses: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in BOUNDARIES}
        for kept in records:
            if kept["name"] in BOUNDARIES and kept["lr"] == LR:
                ends = (math.inf if kept[key] is None else float(kept[key]) for key in ("loss", "loss_whole"))
                self.losses[kept["name"]][int(kept["seed"])] = (*ends,)  # type: ignore[assignment]

    def share_lost(self, name: str) -> list[float]:
        """Of the gain without compression, seed by seed, in per cent; below 0 if the run gained more."""
        whole, runs, before = self.losses[WHOLE], self.losses[name], float(self.base["before"])
        return [
            100 * (runs[seed][0] - whole[seed][0]) / (before - whole[seed][0])
            for seed in sorted(runs.keys() & whole.keys())
        ]


def read_results(output: Path) -> Results:
    """Raises UserError if there is no base, no uncompressed tuning, or a tuning of another base."""
    kept = {path.stem: json.loads(path.read_text()) for path in sorted((output / "records").glob("*.json"))}
    base = kept.pop("base", None)
    if base is None:
        raise UserError(
            f"there are no finished runs in {output}: python -m benchmarks.tuning_boundaries run --data TOKENS"
        )
    for key, run in kept.items():
        if run["initial_sha256"] != base["initial_sha256"]:
            raise UserError(f"{key} started from other weights than the base in {output}: remove its record, run again")
    results = Results(list(kept.values()), base)
    if not any(math.isfinite(loss) for loss, _ in results.losses[WHOLE].values()):
        raise UserError("no uncompressed tuning is finished: the others cannot be compared with it")
    return results


def page(results: Results) -> Iterator[str]:
    yield from head(results)
    yield from (
        "Bytes a token at each boundary, ids included. Share of gain lost: against the fp32 run of the same seed, mean "
        "and range over seeds, in per cent. Whole: the same weights, validated with fp32 boundaries.",
        "",
        "| boundary | seeds | bytes forward | back | loss | loss, whole | share of gain lost, % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    )
    for name, boundary in BOUNDARIES.items():
        losses = results.losses[name]
        if losses:
            forward, backward = Tuning(name=name, boundary=boundary).nbytes_per_token
            on, whole = zip(*(losses[seed] for seed in sorted(losses)), strict=True)
            lost = "-" if name == WHOLE else spread(results.share_lost(name), ".2f")
            yield (
                f"| {name} | {len(losses)} | {forward:.1f} | {backward:.1f} | {plain(on)} | {plain(whole)} | {lost} |"
            )
    yield ""


def head(results: Results) -> Iterator[str]:
    base, ends = results.base, [loss for loss, _ in results.losses[WHOLE].values()]
    others = {kept["lr"]: kept["loss"] for kept in results.records if kept["name"] == "learning rate"}
    tried = ", ".join(
        f"{lr:.2g} gives {'not finite' if loss is None else f'{loss:.4f}'}" for lr, loss in others.items()
    )
    hours = (base["seconds"] + sum(kept["seconds"] for kept in results.records)) / 3600
    factors = ", ".join(f"{factor:.0f}" for factor in base["largest_channels"])
    yield from (
        "# What boundaries cost while a trained model is tuned",
        "",
        "```",
        "thinpipe tokenize --sources BOOKS... --validation-sources OTHER_BOOKS --vocab-size 4096 --output TOKENS",
        "python -m benchmarks.tuning_boundaries run --data TOKENS",
        "python -m benchmarks.tuning_boundaries report",
        "```",
        "",
        f"A dense Llama (width {FULL.width}, {base['parameters'] / 1e6:.1f} M weights, 3 boundaries) was trained on "
        f"{base['tokens'] / 1e6:.1f} M tokens of books (learning rate {BASE_LR:g}), then tuned on {FULL.samples:,} "
        f"samples of {SEQ_LEN} tokens of synthetic dialogues (learning rate {LR:g}). Seeds "
        f"{', '.join(map(str, SEEDS))} change the order of the data and the random rounding of gradients. Loss "
        "on other dialogues: "
        f"{base['before']:.3f} before, {mean(ends):.3f} after, with fp32 boundaries. {hours:.1f} hours of one core. "
        f"At the boundaries of the base, the largest channel is {factors} times as large as the median one; published "
        "models have larger ones, which `benchmarks.published_boundaries` imitates.",
        "",
        *((f"Other learning rates, fp32, seed {SEEDS[0]}: {tried}.", "") if others else ()),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in base["versions"].items()) + ".",
        "",
    )


def report(output: Path) -> None:
    text = "\n".join(page(read_results(output)))
    (output / "tuning_boundaries.md").write_text(text)
    print(text)


def plain(values: Sequence[float]) -> str:
    return spread(values, ".4f").removeprefix("+")
