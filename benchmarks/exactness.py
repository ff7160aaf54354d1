"""How exact is the subspace form? A table, a figure of the two silent failures, then one JSON line.

    python -m benchmarks.exactness [--figure exactness.png] [--steps 1000]

Needs nothing but the project and its tests: the data is a small language made from a seed. About three minutes.
"""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.reference.exactness import LiteralRun, backward_error, round_trip, train_literal, trajectory
from tests.reference.literal import Failure

FAILURES = {
    "row-wise AdamW (right)": Failure(),
    "ordinary AdamW": Failure(ordinary_adamw=True),
    "T_fixed not subtracted": Failure(fixed_not_subtracted=True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: int = 1000
    """Training steps of the drift measurement."""
    figure: Path | None = None
    """Where to draw the loss curves of the failures."""


@dataclass(frozen=True)
class Row:
    what: str
    measured: float
    limit: float | None
    """None: shown beside the others, not held to anything."""

    @property
    def holds(self) -> bool:
        return self.limit is None or self.measured <= self.limit


def measure(options: Options, console: Console) -> tuple[list[Row], dict[str, LiteralRun]]:
    rows = [
        Row(f"boundary round trip, d={dim}, k={dim // 100}, {str(dtype)[6:]}, relative", error, limit)
        for dim in (256, 1024, 4096)
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5))
        for error in [round_trip(dim, dim // 100, dtype)]
    ]
    forms = [(family, free) for family in ("llama", "gpt2") for free in (False, True)]
    for family, free in track(forms, "following the literal form", console=console):
        form = f"{family}, last segment {'free' if free else 'confined'}"
        difference = trajectory(family, free_last=free).largest_difference
        rows.append(Row(f"|loss factored − literal|, 200 steps, 2 basis updates, {form}", difference, 1e-9))
        rows.append(Row(f"gradients cut − uncut, relative, {form}", backward_error(family, free_last=free), 1e-12))
    runs = {}
    for name, failure in track(FAILURES.items(), "training the literal form", console=console):
        runs[name] = train_literal(torch.float32, steps=options.steps, failure=failure)
    exact64 = train_literal(torch.float64, steps=options.steps).drift
    drift = f"‖W − W U Uᵀ‖/‖W‖ after {options.steps} steps"
    rows.append(Row(f"{drift}, row-wise AdamW, float64", exact64, 1e-12))
    rows.append(Row(f"{drift}, row-wise AdamW, float32", runs["row-wise AdamW (right)"].drift, 1e-5))
    rows.append(Row(f"{drift}, ordinary AdamW, float32", runs["ordinary AdamW"].drift, None))
    return rows, runs


def draw(runs: dict[str, LiteralRun], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, run), colour in zip(runs.items(), ("#1b7837", "#d95f02", "#7570b3"), strict=True):
        window = 25
        smooth = torch.tensor(run.losses).unfold(0, window, 1).mean(-1)
        left.plot(range(window // 2, window // 2 + len(smooth)), smooth, color=colour, label=name)
        gaps = {step: max(abs(uncut - run.losses[step]), 1e-8) for step, uncut in run.uncut_losses.items()}
        right.plot(list(gaps), list(gaps.values()), color=colour, label=name)
    left.set(xlabel="step", ylabel="training loss, nats", title="Forgetting T_fixed shows in the loss …")
    right.set(xlabel="step", ylabel="|loss cut − loss uncut|, nats", yscale="log")
    right.set_title("… ordinary AdamW only in the function:\nwhat the boundary drops")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    console = Console(stderr=True)
    rows, runs = measure(options, console)
    table = Table("what", "measured", "limit", "holds")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.measured:.1e}",
            "" if row.limit is None else f"{row.limit:.0e}",
            "yes" if row.holds else "NO",
        )
    Console(width=120).print(table)
    if options.figure:
        draw(runs, options.figure)
    result: dict[str, Any] = {
        "rows": [{"what": row.what, "measured": row.measured, "limit": row.limit} for row in rows],
        "final_loss": {name: sum(run.losses[-50:]) / 50 for name, run in runs.items()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result, ensure_ascii=False))
    raise SystemExit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
