"""What does NATS cost? Tokens per second of the same pipeline over NATS (a real server, TLS) and over gloo.

    python -m benchmarks.nats_speed --output benchmarks/results/nats_speed

Worker processes with one thread each train one stage each; steps over gloo and over NATS are taken in turn (AB BA ...),
at full speed on this machine and behind the emulated home link of `--link.*`, which stands before both in the same way,
so that only the transport differs. gloo against a second set of gloo processes shows what the method itself is worth.
"""

import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.hub_pages import head, origin, write
from benchmarks.links.config import ENGINE_SHAPE, SWEEP_SHAPE
from benchmarks.links.worker_pool import WorkerPool, slowest
from benchmarks.links.workload import Run, RunLink, Shape
from benchmarks.nats_worker import nats_crew
from benchmarks.pairs import PairedRatio, compare, median_interval

WANTED = 0.95
SHAPE = replace(ENGINE_SHAPE, stages=3, sequences=1)
HARD_SHAPE = replace(SWEEP_SHAPE, microbatches=24)
"""Little to compute for each byte that is sent: no good use of a link, but it shows what a transport costs."""
HOME = RunLink(mbps=80, round_trip_ms=40)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    run: Run
    control: bool = False
    """gloo against gloo."""


def cases() -> Iterator[Case]:
    def run(shape: Shape, width: int | None, link: RunLink) -> Run:
        return Run(shape=shape, width=width, number_format="bf16" if width is None else "int8", extra=2, link=link)

    for name, shape in (("ordinary", SHAPE), ("little to compute", HARD_SHAPE)):
        for link in (RunLink(), HOME) if shape is SHAPE else (RunLink(),):
            for width in (shape.dim // 8, None):
                yield Case(name=name, run=run(shape, width, link))
    yield Case(name="gloo against gloo", run=run(SHAPE, None, RunLink()), control=True)


def speed_ratio(times: PairedRatio) -> tuple[float, float, float]:
    """(median, low, high) of second over first in tokens per second, from pairs of seconds."""
    ratios = [first / second for first, second in zip(times.first_seconds, times.second_seconds, strict=True)]
    low, high, _ = median_interval(ratios)
    return statistics.median(ratios), low, high


def measure(case: Case, crews: tuple[WorkerPool, WorkerPool], pairs: int) -> dict[str, Any]:
    for crew in crews:
        crew.prepare([case.run])
    losses: list[list[float | None]] = [[], []]

    def step(which: int) -> float:
        timings = crews[which].time(case.run, 1)
        losses[which].append(timings[-1].loss)
        return slowest(timings)[0]

    times = compare(lambda: step(0), lambda: step(1), pairs=pairs, warmup=2)
    if losses[0] != losses[1]:
        raise RuntimeError(f"{case}: two transports, two losses: {losses}")
    ratio, low, high = speed_ratio(times)
    tokens = case.run.shape.step_tokens
    return {
        "case": msgspec.to_builtins(case),
        "pairs": pairs,
        "gloo_tokens_per_second": tokens / times.first_median_seconds,
        "other_tokens_per_second": tokens / times.second_median_seconds,
        "ratio": ratio,
        "ratio_95": [low, high],
        "coverage": times.coverage,
        "gloo_seconds": times.first_seconds,
        "other_seconds": times.second_seconds,
        "losses_equal": True,
    }


def measure_all(pairs: int, only: str | None) -> Iterator[dict[str, Any]]:
    size = SHAPE.stages
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerPool(size) as gloo,
        WorkerPool(size) as again,
        nats_crew(Path(folder), size) as (_, nats),
    ):
        for case in cases():
            if only is None or only in case.name:
                yield measure(case, (gloo, again if case.control else nats), pairs)


def row(result: dict[str, Any]) -> str:
    case, (low, high) = result["case"], result["ratio_95"]
    run = case["run"]
    method = f"dense {run['number_format']}" if run["width"] is None else f"k={run['width']} {run['number_format']}"
    verdict = "" if case["control"] else ("yes" if low >= WANTED else "no" if high < WANTED else "not shown")
    return (
        f"| {case['name']} | {method} | {RunLink(**run['line']).text} | {result['gloo_tokens_per_second']:,.0f} | "
        f"{result['other_tokens_per_second']:,.0f} | {result['ratio']:.3f} | {low:.3f} to {high:.3f} | {verdict} |"
    )


def page(results: list[dict[str, Any]], config: dict[str, Any]) -> str:
    lines = [
        *head("NATS against gloo", config),
        "",
        "Ratios are of tokens per second, NATS over gloo, in alternating pairs of steps; the interval holds the",
        "median with at least 95 %. Losses were equal bit for bit in every step. At 80 Mbps both go through the same",
        "emulated line (80 Mbps up and down per process, 40 ms round trip); NATS is inside the emulation there, so",
        "the second trip of its star is not in these figures: see the friends benchmark for real links.",
        "",
        f"- ordinary: {SHAPE.text}",
        f"- little to compute: {HARD_SHAPE.text}",
        "",
        f"| model | messages | line | gloo tokens/s | NATS tokens/s | ratio | 95 % | at least {WANTED} |",
        "|---|---|---|---:|---:|---:|---:|---|",
        *map(row, results),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.md and OUTPUT.json")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--only", help="cases whose name has this in it")
    options = parser.parse_args()
    config = origin("nats_speed") | {"threads": 1}
    results = []
    for result in measure_all(options.pairs, options.only):  # written after each: what was measured is not lost
        results.append(result)
        print(row(result), flush=True)
        write(options.output, page(results, config), config, results)


if __name__ == "__main__":
    main()
