"""The result of `python -m benchmarks.links` for people: one Markdown page, part by part, with what was reached."""

from collections.abc import Iterator, Sequence

from benchmarks.links.results import (
    TARGET_ENGINE,
    TARGET_RATIO,
    TARGET_SWEEP,
    EngineRow,
    MethodRow,
    RatioRow,
    ScheduleRow,
    SweepRow,
)
from benchmarks.pairs import PairedRatio

MIB = 2**20


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    lines = [columns, ["---", *("--:" for _ in columns[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def engine_section(rows: Sequence[EngineRow]) -> Iterator[str]:
    yield "## Against the bare engine"
    yield f"Full speed, float32 messages, dense model: {rows[0].run.shape.text}."
    yield table(
        ("schedule", "ours, tokens/s", "bare, tokens/s", "ratio", "interval", "busy by process"),
        [
            (
                row.run.schedule,
                f"{row.tokens_per_second:,.0f}",
                f"{row.bare_tokens_per_second:,.0f}",
                f"{row.ratio.median:.3f}",
                _interval(row.ratio),
                ", ".join(f"{share:.2f}" for share in row.busy),
            )
            for row in rows
        ],
    )
    yield _verdict(f"at least {TARGET_ENGINE}", all(row.reached for row in rows), min(r.ratio.median for r in rows))


def sweep_section(methods: Sequence[MethodRow], rows: Sequence[SweepRow]) -> Iterator[str]:
    run = methods[0].run
    yield "## Tokens per second over the link"
    yield (
        f"{run.shape.text}; {run.schedule_text} micro-batches in flight. Compute-only is the same run at full speed, "
        "link-only is arithmetic (bytes on the busiest link with all framing, fill and drain); the ratio is measured / "
        "the smaller of the two."
    )
    yield table(
        ("method", "bytes/token on the busiest link", "compute-only, tokens/s", "stops being link-bound at, Mbps"),
        [
            (
                method.run.method,
                f"{method.busiest_nbytes_per_token:,.1f}",
                f"{method.compute_only:,.0f}",
                f"{method.break_even_mbps:,.2f}",
            )
            for method in methods
        ],
    )
    yield table(
        ("method", "Mbps", "round trip, ms", "measured", "compute-only", "link-only", "ratio"),
        [
            (
                row.run.method,
                f"{row.run.link.mbps:g}",
                f"{row.run.link.round_trip_ms:g}",
                f"{row.measured:,.0f}",
                f"{row.compute_only:,.0f}",
                f"{row.link_only:,.0f}",
                f"{row.ratio:.3f}" + ("" if row.reached else " (below target)"),
            )
            for row in rows
        ],
    )
    reached, worst = sum(row.reached for row in rows), min(rows, key=lambda row: row.ratio)
    yield _verdict(f"at least {TARGET_SWEEP} at every point", reached == len(rows), worst.ratio) + (
        f" Reached at {reached} of {len(rows)} points; the lowest is {worst.run.method} at {worst.run.link.text}."
    )


def ratio_section(rows: Sequence[RatioRow]) -> Iterator[str]:
    yield "## Compressed against uncompressed bfloat16 messages"
    yield table(
        ("setting", "link", "dense, tokens/s", "its link bound", "compressed", "its link bound", "times", "interval"),
        [
            (
                f"{row.name} ({row.thin.method})",
                row.thin.link.text,
                f"{row.dense_tokens_per_second:,.0f}",
                f"{row.dense_link_only:,.0f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.link_only:,.0f}",
                f"{row.ratio.median:.2f}",
                _interval(row.ratio),
            )
            for row in rows
        ],
    )
    for row in rows:
        yield f"{row.name.capitalize()}: {row.shape.text}, k={row.thin.width}."
    yield _verdict(f"at least {TARGET_RATIO} times", rows[0].reached, rows[0].ratio.median)
    for row in rows:
        yield from _operators(row)


def _operators(row: RatioRow) -> Iterator[str]:
    """Where a compressed step goes: by operator and process, in milliseconds of the profiled step."""
    processes = row.point.operators
    names = list(dict.fromkeys(operator.name for process in processes for operator in process.operators))
    cells = [{operator.name: operator for operator in process.operators} for process in processes]
    total = {name: sum(each[name].milliseconds for each in cells if name in each) for name in names}
    names.sort(key=lambda name: (name == "all others", -total[name]))
    yield (
        f"A compressed step with {row.name}, in milliseconds that each operator takes by itself (processes did not "
        f"wait for messages in {', '.join(f'{share:.0%}' for share in row.busy)} of the step):"
    )
    yield table(
        ("operator", *(f"process {index}" for index in range(len(processes)))),
        [
            *((name, *(f"{each[name].milliseconds:.0f}" if name in each else "" for each in cells)) for name in names),
            ("**the step**", *(f"{process.step_milliseconds:.0f}" for process in processes)),
        ],
    )


def schedules_section(rows: Sequence[ScheduleRow]) -> Iterator[str]:
    yield "## Schedules on a link with latency"
    yield (
        f"{rows[0].run.link.text} round trip; {rows[0].run.shape.text}. Peak is the largest resident set within a "
        "step, less what the process held before the model was built; of it, activations and messages come and go."
    )
    yield table(
        ("method", "schedule", "tokens/s", "of the link bound", "peak MiB by process", "come and go, MiB"),
        [
            (
                row.run.method,
                row.run.schedule_text,
                f"{row.tokens_per_second:,.0f}",
                f"{row.tokens_per_second / row.link_only:.2f}",
                ", ".join(f"{each.peak_nbytes / MIB:.0f}" for each in row.memory),
                ", ".join(f"{each.passing_nbytes / MIB:.0f}" for each in row.memory),
            )
            for row in rows
        ],
    )


def _interval(ratio: PairedRatio) -> str:
    return f"{ratio.low:.3f} - {ratio.high:.3f} ({ratio.coverage:.1%}, {len(ratio.first_seconds)} pairs)"


def _verdict(target: str, reached: bool, value: float) -> str:
    return f"Target {target}: {'reached' if reached else 'NOT REACHED'} ({value:.3f})."
