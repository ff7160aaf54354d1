"""Loss over the clock: how long a step takes over real shaped lines, times the losses that the study measured.

    python -m benchmarks.convergence clock --data TOKENS

Four processes, 1F1B, every one behind an emulated line, timed for a few steps of the same run that the study trained in
one process: the losses are the same, bit for bit, so only the time has to be measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.convergence.results import Result, best_of_learning_rates, read_results
from benchmarks.convergence.runs import RUNS
from benchmarks.convergence.study import TOKENS_PER_STEP, Study
from thinpipe.core.config import dump_toml
from thinpipe.core.files import write_atomically
from thinpipe.report.curve import pyplot
from thinpipe.report.summary import summarise
from thinpipe.train.config import ParallelismSection, RunConfig, SchedulerSection, TrainingSection, ValidationSection
from thinpipe.transport.settings import LinkSection

RATES: tuple[int | None, ...] = (None, 10, 20, 50, 80, 200)
"""Mbps of every process's line, up and down, with 40 ms there and back; None: no line at all."""
STEPS, WARM_UP = 7, 2
PAPER_RATE = 80


def timed_config(study: Study, data: Path, folder: Path, mbps: int | None) -> RunConfig:
    config = study.config(data, folder)
    line = LinkSection(up=f"{mbps}mbps", down=f"{mbps}mbps", latency="20ms") if mbps else LinkSection()
    parallelism = ParallelismSection(
        pipeline_parallel_degree=len(study.cuts) + 1,
        pipeline_parallel_microbatch_size=1,
        pipeline_parallel_extra_microbatches=4,
    )
    return replace(
        config,
        training=TrainingSection(
            steps=STEPS, global_batch_size=config.training.global_batch_size, seq_len=config.training.seq_len
        ),
        lr_scheduler=SchedulerSection(warmup_steps=1),
        parallelism=parallelism,
        link=line,
        validation=ValidationSection(freq=0),
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


def raced(results: list[Result]) -> list[Study]:
    """The dense run and the subspace runs that have the longest results, seed 0."""
    longest = max(result.tokens for result in results)
    done = {result.name for result in results if result.tokens == longest}
    chosen = [study for study in RUNS if study.tokens == longest and study.seed == 0 and study.name in done]
    return [study for study in chosen if study.name == "dense" or study.width is not None]


def measure(data: Path, output: Path) -> None:
    """Adds what is missing to OUTPUT/step_seconds.json, then draws."""
    path = output / "step_seconds.json"
    times: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    todo = [
        (study, mbps)
        for study in raced(read_results(output))
        for mbps in RATES
        if str(mbps or "none") not in times.get(study.name, {})
    ]
    for number, (study, mbps) in enumerate(todo, 1):
        seconds = step_seconds(study, data, mbps)
        times.setdefault(study.name, {})[str(mbps or "none")] = seconds
        write_atomically(path, (json.dumps(times, indent=1) + "\n").encode())
        print(f"[{number}/{len(todo)}] {study.name} at {mbps or 'no'} Mbps: {seconds:.3f} s a step", flush=True)
    report_clock(output)


def tokens_to(loss: float, curve: list[tuple[int, float]]) -> float | None:
    """Tokens after which a curve of validation losses first comes down to `loss`, on straight lines between points."""
    for (left, above), (right, below) in pairwise(curve):
        if below <= loss <= above:
            return left + (right - left) * (above - loss) / (above - below) if above > below else float(left)
    return None


def curves(results: list[Result]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    for result in results:
        yield result.name, [(int(point["tokens"]), point["loss"]) for point in result.validations]


def report_clock(output: Path) -> None:
    times = json.loads((output / "step_seconds.json").read_text())
    results = read_results(output)
    longest = max(result.tokens for result in results)
    wanted = [r for r in best_of_learning_rates(results) if r.tokens == longest and r.seed == 0 and r.name in times]
    losses = dict(curves(wanted))
    target = max(curve[-1][1] for curve in losses.values())
    lines = [
        "# Loss over the clock",
        "",
        f"Seconds to a validation loss of {target:.3f}, which every one of these reaches within {longest / 1e6:.1f} M "
        "tokens. Four stages on one machine, 40 ms round trip; losses of the study, seconds of timed steps.",
        "",
        "| run | " + " | ".join(f"{mbps} Mbps" if mbps else "no line" for mbps in RATES) + " |",
        "|---|" + "---:|" * len(RATES),
    ]
    to_target: dict[str, dict[str, float]] = {}
    for name, curve in losses.items():
        tokens = tokens_to(target, curve)
        assert tokens is not None, "the target is the highest of the last losses"
        to_target[name] = {rate: tokens / TOKENS_PER_STEP * seconds for rate, seconds in times[name].items()}
        cells = (f"{to_target[name][str(mbps or 'none')]:,.0f}" for mbps in RATES)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *crossings(to_target), ""]
    (output / "clock.md").write_text("\n".join(lines))
    print("\n".join(lines))
    draw(losses, times, to_target, target, output / "clock.png")


def crossings(to_target: dict[str, dict[str, float]]) -> list[str]:
    """Between which measured rates dense overtakes each of the others."""
    rates = [str(mbps) for mbps in RATES if mbps]
    lines = []
    for name, seconds in to_target.items():
        if name == "dense":
            continue
        wins = [rate for rate in rates if to_target["dense"][rate] <= seconds[rate]]
        loses = [rate for rate in rates if rate not in wins]
        if not wins:
            lines.append(f"- {name} reaches the loss before dense at every rate measured, up to {rates[-1]} Mbps.")
        elif not loses:
            lines.append(f"- dense reaches the loss before {name} at every rate measured, from {rates[0]} Mbps on.")
        else:
            lines.append(f"- dense overtakes {name} between {loses[-1]} and {wins[0]} Mbps.")
    return lines


def draw(losses: dict[str, Any], times: dict[str, Any], to_target: dict[str, Any], target: float, path: Path) -> None:
    plt = pyplot()
    figure, (over_time, to_loss) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    colours = dict(zip(losses, plt.get_cmap("tab10").colors, strict=False))
    for name, curve in losses.items():
        for rate, style in (("none", ":"), (str(PAPER_RATE), "-")):
            if rate == "none" and name != "dense":
                continue
            minutes = [tokens / TOKENS_PER_STEP * times[name][rate] / 60 for tokens, _ in curve]
            label = f"{name}, {'no line' if rate == 'none' else rate + ' Mbps'}"
            over_time.plot(minutes, [loss for _, loss in curve], style, marker="o", color=colours[name], label=label)
    over_time.axhline(target, color="#444444", linewidth=1)
    over_time.set(
        xlabel="minutes", ylabel="validation loss, nats per token", title=f"Loss over time, {PAPER_RATE} Mbps"
    )
    rates = [mbps for mbps in RATES if mbps]
    for name, seconds in to_target.items():
        minutes = [seconds[str(mbps)] / 60 for mbps in rates]
        to_loss.plot(rates, minutes, "o-", color=colours[name], label=name)
    to_loss.set_xscale("log")
    to_loss.set_yscale("log")
    to_loss.set_xticks(rates, [str(mbps) for mbps in rates])
    to_loss.minorticks_off()
    to_loss.set(xlabel="Mbps of every line", ylabel="minutes", title=f"Time to a loss of {target:.3f}")
    for axes in (over_time, to_loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
