"""Loss over the clock: how long a step takes over shaped links, times the losses that the study measured.

    python -m benchmarks.convergence clock --data TOKENS

Four processes, 1F1B, every one behind an emulated link, timed for a few steps of the run that the study trained in one
process: with the same micro-batches the losses are the same, bit for bit, so only the time has to be measured (a study
in larger ones is timed in these: its losses differ by roundings alone).
"""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from benchmarks.convergence.execute import has_settings, settings_of
from benchmarks.convergence.results import Result, best_of_learning_rates, read_results
from benchmarks.convergence.study import MICROBATCH, TOKENS_PER_STEP, Study
from benchmarks.provenance import versions
from thinpipe.config.link import LinkConfig
from thinpipe.config.run import LRSchedulerConfig, RunConfig, ValidationConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.files import write_atomically
from thinpipe.report.figures import pyplot
from thinpipe.report.summary import summarise

Rates = Sequence[int | None]
RATES: Rates = (None, 10, 20, 50, 80, 200)
"""Mbps of every process's link, up and down, with 40 ms there and back; None: no emulated link."""
STEPS, WARM_UP = 7, 2
PAPER_RATE = 80

Curve = list[tuple[int, float]]
"""Tokens and validation loss."""


class Timed(msgspec.Struct):
    """Seconds of a step of one run, by the rate of the link."""

    settings: str
    seconds: dict[str, float] = {}


class Times(msgspec.Struct):
    """What OUTPUT/step_seconds.json holds, by the name of the run."""

    versions: dict[str, Any]
    runs: dict[str, Timed] = {}


def read_times(output: Path) -> Times:
    path = output / "step_seconds.json"
    return msgspec.json.decode(path.read_bytes(), type=Times) if path.is_file() else Times(versions=versions())


def timed_config(study: Study, data: Path, folder: Path, mbps: int | None) -> RunConfig:
    config = study.config(data, folder)
    link = LinkConfig(up=f"{mbps}mbps", down=f"{mbps}mbps", latency="20ms") if mbps else LinkConfig()
    return replace(
        config,
        training=replace(config.training, steps=STEPS),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree=len(study.cuts) + 1,
            pipeline_parallel_microbatch_size=min(study.microbatch, MICROBATCH),
        ),
        link=link,
        validation=ValidationConfig(freq=0),
    )


def step_seconds(study: Study, data: Path, mbps: int | None) -> float:
    with tempfile.TemporaryDirectory() as place:
        settings = Path(place) / "run.toml"
        settings.write_text(dump_toml(timed_config(study, data, Path(place) / "run", mbps)))
        subprocess.run(
            [sys.executable, "-m", "thinpipe", "train", str(settings)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return median(step.seconds for step in summarise(Path(place) / "run").steps[WARM_UP:])


def raced(output: Path, runs: Sequence[Study]) -> list[Study]:
    """One of these for every name that has results with the most tokens."""
    names = {study.name for study in runs}
    results = [result for result in read_results(output) if result.name in names and not result.diverged]
    longest = max((result.tokens for result in results), default=0)
    done = {result.name for result in results if result.tokens == longest}
    return list({study.name: study for study in runs if study.name in done}.values())


def measure(data: Path, output: Path, runs: Sequence[Study], rates: Rates = RATES, shown: int = PAPER_RATE) -> None:
    """Adds what is missing to OUTPUT/step_seconds.json, then reports. `shown`: the rate at which losses are drawn."""
    times, studies = read_times(output), raced(output, runs)
    for study in studies:
        known = times.runs.get(study.name)
        if known is None or not has_settings(study, known.settings, where=output / "step_seconds.json"):
            times.runs[study.name] = Timed(settings=settings_of(study))
    todo = [(study, mbps) for study in studies for mbps in rates if key(mbps) not in times.runs[study.name].seconds]
    for number, (study, mbps) in enumerate(todo, 1):
        seconds = times.runs[study.name].seconds[key(mbps)] = step_seconds(study, data, mbps)
        write_atomically(output / "step_seconds.json", msgspec.json.format(msgspec.json.encode(times)) + b"\n")
        print(f"[{number}/{len(todo)}] {study.name} at {key(mbps)} Mbps: {seconds:.3f} s a step", flush=True)
    print(report_clock(output, rates, shown))


def key(mbps: int | None) -> str:
    return "unlimited" if mbps is None else str(mbps)


def tokens_to(loss: float, curve: Curve) -> float | None:
    """Tokens after which a curve of validation losses first comes down to `loss`, on straight lines between points."""
    if curve and curve[0][1] <= loss:
        return float(curve[0][0])
    for (left, above), (right, below) in pairwise(curve):
        if below <= loss <= above:
            return left + (right - left) * (above - loss) / (above - below) if above > below else float(left)
    return None


def fewest_tokens_to(loss: float, curves: Sequence[Curve]) -> float | None:
    """Over runs of every length: one whose rate had decayed by then may be there before the middle of a longer one."""
    found = [tokens for curve in curves if (tokens := tokens_to(loss, curve)) is not None]
    return min(found, default=None)


def curve_of(result: Result) -> Curve:
    return [(int(point["tokens"]), point["loss"]) for point in result.validations]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of seeds, which are validated after the same tokens."""
    return [(points[0][0], mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def tokens_of(name: str, seed: int, loss: float, results: Sequence[Result]) -> float:
    """That a run of this name and seed needs, where at least one is known to end at this loss or below."""
    curves = [curve_of(result) for result in results if (result.name, result.seed) == (name, seed)]
    tokens = fewest_tokens_to(loss, curves)
    assert tokens is not None, f"{name}, seed {seed} never comes to {loss}"
    return tokens


def report_clock(output: Path, rates: Rates = RATES, shown: int = PAPER_RATE) -> str:
    times = read_times(output).runs
    results = [result for result in read_results(output) if not result.diverged and result.name in times]
    longest = max(result.tokens for result in results)
    finals: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in best_of_learning_rates(results):
        if result.tokens == longest:
            finals[result.name][result.seed] = result
    seeds = sorted(set.intersection(*(set(same) for same in finals.values())))
    targets = {seed: max(same[seed].loss for same in finals.values()) for seed in seeds}
    target = mean(targets.values())
    lines = [
        "# Loss over the clock",
        "",
        f"Minutes to the validation loss at which the worst of these ends after {longest / 1e6:.1f} M tokens, seed by "
        f"seed, then the mean over seeds {', '.join(map(str, seeds))}; that loss is {target:.3f} in the mean. Four "
        "stages on one machine, 40 ms there and back; losses of the study, seconds of timed steps. Of runs of several "
        "lengths the first to arrive counts. Still, the better a method, the earlier in its schedule it is read off, "
        "which is to its disadvantage.",
        "",
        "| run | " + " | ".join(f"{key(mbps)} Mbps" for mbps in rates) + " |",
        "|---|" + "---:|" * len(rates),
    ]
    minutes: dict[str, dict[str, float]] = {}
    for name in finals:
        arrived = [tokens_of(name, seed, targets[seed], results) for seed in seeds]
        steps = mean(arrived) / TOKENS_PER_STEP
        minutes[name] = {rate: steps * seconds / 60 for rate, seconds in times[name].seconds.items()}
        cells = (f"{minutes[name][key(mbps)]:,.1f}" for mbps in rates)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *break_even_rates(minutes, rates), "", "![loss over the clock](clock.png)", ""]
    (output / "clock.md").write_text("\n".join(lines))
    curves = {name: mean_curve([curve_of(same[seed]) for seed in seeds]) for name, same in finals.items()}
    seconds = {name: times[name].seconds for name in finals}
    draw(curves, seconds, minutes, target, output / "clock.png", rates, shown)
    return "\n".join(lines)


def break_even_rates(minutes: Mapping[str, Mapping[str, float]], all_rates: Rates) -> list[str]:
    """Between which measured rates dense overtakes each of the others."""
    rates = [key(mbps) for mbps in all_rates if mbps]
    lines = []
    for name, mine in minutes.items():
        if name == "dense":
            continue
        wins = [rate for rate in rates if minutes["dense"][rate] <= mine[rate]]
        loses = [rate for rate in rates if rate not in wins]
        if not wins:
            lines.append(f"- {name} reaches the loss before dense at every rate measured, up to {rates[-1]} Mbps.")
        elif not loses:
            lines.append(f"- dense reaches the loss before {name} at every rate measured, from {rates[0]} Mbps on.")
        else:
            lines.append(f"- dense overtakes {name} between {loses[-1]} and {wins[0]} Mbps.")
    return lines


def draw(
    curves: Mapping[str, Curve],
    seconds: Mapping[str, Mapping[str, float]],
    minutes: Mapping[str, Mapping[str, float]],
    target: float,
    path: Path,
    all_rates: Rates,
    shown: int,
) -> None:
    plt = pyplot()
    figure, (over_time, to_loss) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    colours = {name: plt.get_cmap("tab10")(index) for index, name in enumerate(curves)}
    for name, curve in curves.items():
        for rate, style in (("unlimited", ":"), (str(shown), "-")):
            if rate == "unlimited" and name != "dense":
                continue
            times = [tokens / TOKENS_PER_STEP * seconds[name][rate] / 60 for tokens, _ in curve]
            label = f"{name}, {'no limit' if rate == 'unlimited' else rate + ' Mbps'}"
            over_time.plot(times, [loss for _, loss in curve], style, marker="o", color=colours[name], label=label)
    over_time.axhline(target, color="#444444", linewidth=1)
    over_time.set(
        xlabel="minutes",
        ylabel="validation loss, nats per token",
        title=f"Loss over time, {shown} Mbps, seeds' mean",
    )
    rates = [mbps for mbps in all_rates if mbps]
    for name, mine in minutes.items():
        to_loss.plot(rates, [mine[key(mbps)] for mbps in rates], "o-", color=colours[name], label=name)
    to_loss.set_xscale("log")
    to_loss.set_yscale("log")
    to_loss.set_xticks(rates, [str(mbps) for mbps in rates])
    low, high = to_loss.get_ylim()
    ticks = [tick for tick in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500, 1000) if low <= tick <= high]
    to_loss.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    to_loss.minorticks_off()
    to_loss.set(xlabel="Mbps of every line", ylabel="minutes", title=f"Time to a loss of {target:.3f}")
    for axes in (over_time, to_loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
