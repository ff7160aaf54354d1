"""Every setting in one table, the claims in another, and a figure. Reads what the trainings left and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from benchmarks.images.claims import BEFORE, Results, Scores
from benchmarks.images.figure import draw
from benchmarks.images.settings import SETTINGS, Setting
from benchmarks.images.training import Outcome, Recipe
from benchmarks.lossy_claims import HOW_TO_READ, decide
from benchmarks.verdicts import claim_table
from thinpipe.core.errors import UserError

COLUMNS = ("bytes/image", "wrong, on", "loss, on", "wrong, off", "loss, off", "training loss")


def report(outcomes: Sequence[Outcome], recipe: Recipe, output: Path) -> None:
    """images.md and images.png, of the seeds that all settings have."""
    outcomes = whole_seeds(outcomes)
    results = Results.of(outcomes)
    draw(results, output / "images.png")
    (output / "images.md").write_text("\n".join(page(outcomes, results, recipe)) + "\n")


def whole_seeds(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of the seeds that all settings have."""
    done = {(outcome.setting, outcome.seed) for outcome in outcomes}
    seeds = {seed for _, seed in done if all((setting, seed) in done for setting in SETTINGS)}
    if not seeds:
        raise UserError("no seed has all settings yet: `run` goes on with what is missing, `list` names it")
    return [outcome for outcome in outcomes if outcome.seed in seeds]


def page(outcomes: Sequence[Outcome], results: Results, recipe: Recipe) -> Iterator[str]:
    seeds = sorted({outcome.seed for outcome in outcomes})
    yield "# Lossy boundaries in a small ResNet: arXiv 2401.07788 on digits"
    yield ""
    yield from ("```", "python -m benchmarks.images run --output FOLDER")
    yield from ("python -m benchmarks.images report --output FOLDER", "```", "")
    yield "Every training is a line of [images.jsonl](images.jsonl), with its settings, seed and versions."
    yield ""
    yield (
        f"ResNet cut in four, {recipe.images} digits of 8 x 8 to train on ({recipe.copies} shifted copies of each, "
        f"{recipe.epochs} epochs) and {recipe.images} others to test on. Seeds {', '.join(map(str, seeds))}: first "
        "weights and order of the data. Wrong answers and loss on the test images, mean (least to most over the seeds)."
        " Verdicts rest on the loss."
    )
    yield ""
    yield "![test loss over the strength of compression](images.png)"
    yield ""
    yield "## Claims"
    yield ""
    yield f"{HOW_TO_READ} Here the gain is from a guess, {BEFORE:.2f}, to {results.judge.uncompressed:.3f}."
    yield ""
    yield from claim_table(results.judge, partial(decide, results.evidence))
    yield ""
    yield "## All settings"
    yield ""
    yield from header("kind", "memory", "compressed", "kept", *COLUMNS)
    for setting in SETTINGS:
        yield row(setting, results, [outcome for outcome in outcomes if outcome.setting == setting])
    yield ""
    facts = {**asdict(recipe), **outcomes[-1].versions, "core-minutes": round(sum(o.seconds for o in outcomes) / 60)}
    yield "; ".join(f"{name} {value}" for name, value in facts.items())


def header(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", f"|{'|'.join('--:' if name in COLUMNS else '---' for name in names)}|"


def row(setting: Setting, results: Results, outcomes: Sequence[Outcome]) -> str:
    on, off = results.on[setting], results.off[setting]
    losses = [outcome.training_loss for outcome in outcomes if outcome.training_loss is not None]
    cells = (
        setting.kind,
        setting.feedback,
        setting.where if setting.kind != "none" else "",
        setting.level_name,
        f"{outcomes[0].nbytes_per_image:,.0f}",
        *cells_of(on),
        *(cells_of(off) if replace(setting, where="gradients") != setting else ("as on", "as on")),
        f"{fmean(losses):.3f}" if len(losses) == len(outcomes) else "not finite",
    )
    return f"| {' | '.join(cells)} |"


def cells_of(scores: Scores) -> tuple[str, str]:
    return (
        f"{scores.error:.1%} ({min(scores.errors):.1%} to {max(scores.errors):.1%})",
        f"{scores.loss:.3f} ({min(scores.losses):.3f} to {max(scores.losses):.3f})",
    )
