"""`python -m benchmarks.step`: measures, shows progress meanwhile, then prints tables and one JSON line.

Times are taken first and memory afterwards, so that the memory processes never disturb a clock.
"""

import json
import sys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.command_line import run_benchmark
from benchmarks.pairs import PairedRatio
from benchmarks.provenance import plain_settings, versions
from benchmarks.step.config import StepConfig
from benchmarks.step.figure import draw
from benchmarks.step.memory_plan import StepMemory
from benchmarks.step.operators import operator_table
from benchmarks.step.results import TARGET_COMPRESSION, Comparison, StepResult, VariantFacts, judge
from benchmarks.step.tables import print_result
from benchmarks.step.timing import steps_to_time, time_steps
from benchmarks.step.training_step import TrainingStep, set_threads
from benchmarks.step.variants import Variant, dense_variant, subspace_variants
from thinpipe.core.errors import UserError

WIDTH_IN_FILES = 120
"""Columns of a table when nobody's terminal sets them."""

Times = dict[tuple[Variant, int], PairedRatio]


def run(config: StepConfig) -> None:
    """Measures everything, prints it and writes what was asked for."""
    result = measure(config)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_IN_FILES)
    print_result(result, console)
    if not all(target.reached for target in result.targets):
        console.print("\nA target was missed. The ten costliest operators of one step of each model:")
        for name, table in _operator_tables(config):
            console.out(f"\n{name}\n{table}", highlight=False)
    line = json.dumps(result.as_json())
    if config.json is not None:
        config.json.write_text(line + "\n", encoding="utf-8")
    if config.figure is not None:
        draw(result, config.figure)
    print(line)


def measure(config: StepConfig) -> StepResult:
    """All times, then all memory."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch finds no CUDA device here: use --device cpu")
    set_threads(config.threads)
    variants = list(subspace_variants(config))
    memory = StepMemory(config, variants)
    with _progress() as progress:
        timing_task = progress.add_task("timed steps", total=steps_to_time(config, variants))
        memory_task = progress.add_task("memory processes", total=len(memory.jobs), start=False)
        times = time_steps(config, variants, lambda: progress.advance(timing_task))
        progress.start_task(memory_task)
        memory.measure(lambda: progress.advance(memory_task))
    return _result(config, variants, times, memory)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left:"), TimeRemainingColumn(), console=Console(stderr=True))


def _result(config: StepConfig, variants: Sequence[Variant], times: Times, memory: StepMemory) -> StepResult:
    facts = tuple(_facts(variant, memory, config.seqs[0]) for variant in (memory.dense, *variants))
    comparisons = tuple(_comparison(variant, seq, time, memory) for (variant, seq), time in times.items())
    judged = TARGET_COMPRESSION in config.compressions
    return StepResult(
        config=plain_settings(config),
        versions=versions(),
        threads=torch.get_num_threads(),
        variants=facts,
        comparisons=comparisons,
        growth=tuple(memory.growth(variant) for variant in variants if variant.match == "shape"),
        targets=judge(config.width(TARGET_COMPRESSION), facts, comparisons) if judged else (),
    )


def _facts(variant: Variant, memory: StepMemory, seq: int) -> VariantFacts:
    return VariantFacts(
        name=variant.name,
        width=variant.width,
        match=variant.match,
        hidden_dim=variant.hidden_dim,
        trainable=variant.trainable,
        optimizer_nbytes=memory.at_timed_shape(variant, seq).optimizer_nbytes,
    )


def _comparison(variant: Variant, seq: int, time: PairedRatio, memory: StepMemory) -> Comparison:
    assert variant.width is not None
    return Comparison(
        variant=variant.name,
        width=variant.width,
        match=variant.match,
        batch=memory.config.tokens // seq,
        seq=seq,
        time=time,
        dense_peak_nbytes=memory.at_timed_shape(memory.dense, seq).peak_nbytes,
        peak_nbytes=memory.at_timed_shape(variant, seq).peak_nbytes,
    )


def _operator_tables(config: StepConfig) -> Iterator[tuple[str, str]]:
    """For the dense model and the variant that the targets are about, at the longest sequences."""
    width, seq = config.width(TARGET_COMPRESSION), max(config.seqs)
    variant = next(variant for variant in subspace_variants(config) if variant.width == width)
    for each in (dense_variant(config), variant):
        step = TrainingStep(each, device=config.device, bf16=config.bf16)
        step.set_batch(config.tokens // seq, seq)
        yield each.name, operator_table(step)


if __name__ == "__main__":
    sys.exit(run_benchmark("step", StepConfig, run))
