"""What `python -m benchmarks.links` found, as plain numbers: JSON, summary and figures all read this. Measures
nothing."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.links.bounds import break_even_mbps, busiest_nbytes, link_bound_seconds
from benchmarks.links.points import Point, ProcessMemory
from benchmarks.links.workload import Run, Shape
from benchmarks.pairs import PairedRatio, paired_ratio

TARGET_ENGINE = 0.97
TARGET_SWEEP = 0.90
TARGET_RATIO = 16.4
"""592.41 / 36.12 tokens per second at 80 Mbps: arXiv 2506.01260."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """Ours over the bare engine, in tokens per second."""

    run: Run
    ratio: PairedRatio
    tokens_per_second: float
    bare_tokens_per_second: float
    busy: tuple[float, ...]
    """By process, in our steps."""

    @property
    def reached(self) -> bool:
        return self.ratio.median >= TARGET_ENGINE


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One method on one link; everything in tokens per second."""

    run: Run
    measured: float
    compute_only: float
    """The same run at full speed, at about the same time."""
    link_only: float
    """The same run if computing took no time."""
    busiest_nbytes_per_token: float

    @property
    def bound(self) -> float:
        return min(self.compute_only, self.link_only)

    @property
    def ratio(self) -> float:
        return self.measured / self.bound

    @property
    def reached(self) -> bool:
        return self.ratio >= TARGET_SWEEP


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method over all links of the sweep."""

    run: Run
    """At full speed."""
    compute_only: float
    compute_steps: int
    """Timed for it, spread over the method's points."""
    busiest_nbytes_per_token: float
    break_even_mbps: float
    """Above this rate the link no longer decides."""


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """Compressed over uncompressed, in tokens per second."""

    name: str
    shape: Shape
    dense: Run
    thin: Run
    ratio: PairedRatio
    dense_tokens_per_second: float
    tokens_per_second: float
    dense_link_only: float
    link_only: float
    busy: tuple[float, ...]
    """By process, in the compressed steps."""
    point: Point
    """With the operators of a compressed step."""

    @property
    def reached(self) -> bool:
        return self.ratio.median >= TARGET_RATIO


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    run: Run
    tokens_per_second: float
    link_only: float
    memory: tuple[ProcessMemory, ...]
    """By process."""


def engine_rows(points: Iterable[Point]) -> list[EngineRow]:
    rows = []
    for point in _of("engine", points):
        own, bare = point.times
        run = point.task.runs[0]
        rows.append(
            EngineRow(
                run=run,
                ratio=paired_ratio(own.seconds, bare.seconds),
                tokens_per_second=tokens_per_second(run, own.seconds),
                bare_tokens_per_second=tokens_per_second(run, bare.seconds),
                busy=_medians(own.busy),
            )
        )
    return rows


def sweep_rows(points: Iterable[Point]) -> tuple[list[MethodRow], list[SweepRow]]:
    """Compute-only at a point is the median of the steps at full speed beside it and beside its two neighbours."""
    by_method: dict[Run, list[Point]] = {}
    for point in _of("sweep", points):
        by_method.setdefault(point.task.runs[0], []).append(point)
    methods, rows = [], []
    for free, own in by_method.items():
        full_speed = [point.times[0].seconds for point in own]
        everywhere = [seconds for each in full_speed for seconds in each]
        methods.append(
            MethodRow(
                run=free,
                compute_only=tokens_per_second(free, everywhere),
                compute_steps=len(everywhere),
                busiest_nbytes_per_token=_busiest_per_token(free),
                break_even_mbps=break_even_mbps(free, statistics.median(everywhere)),
            )
        )
        for index, point in enumerate(own):
            nearby = [seconds for each in full_speed[max(0, index - 1) : index + 2] for seconds in each]
            run = point.task.runs[1]
            rows.append(
                SweepRow(
                    run=run,
                    measured=tokens_per_second(run, point.times[1].seconds),
                    compute_only=tokens_per_second(run, nearby),
                    link_only=_link_only(run),
                    busiest_nbytes_per_token=_busiest_per_token(run),
                )
            )
    return methods, rows


def ratio_rows(points: Iterable[Point]) -> list[RatioRow]:
    rows = []
    for point in _of("ratio", points):
        (dense, thin), (dense_times, thin_times) = point.task.runs, point.times
        rows.append(
            RatioRow(
                name=point.task.name,
                shape=thin.shape,
                dense=dense,
                thin=thin,
                ratio=paired_ratio(thin_times.seconds, dense_times.seconds),
                dense_tokens_per_second=tokens_per_second(dense, dense_times.seconds),
                tokens_per_second=tokens_per_second(thin, thin_times.seconds),
                dense_link_only=_link_only(dense),
                link_only=_link_only(thin),
                busy=_medians(thin_times.busy),
                point=point,
            )
        )
    return rows


def schedule_rows(points: Iterable[Point]) -> list[ScheduleRow]:
    chosen = _of("schedules", points)
    memory = {point.task.runs[0]: tuple(point.memory) for point in chosen if point.task.memory}
    return [
        ScheduleRow(
            run=run,
            tokens_per_second=tokens_per_second(run, times.seconds),
            link_only=_link_only(run),
            memory=memory.get(run, ()),
        )
        for point in chosen
        if not point.task.memory
        for run, times in zip(point.task.runs, point.times, strict=True)
    ]


def tokens_per_second(run: Run, seconds: Sequence[float]) -> float:
    return run.shape.step_tokens / statistics.median(seconds)


def _link_only(run: Run) -> float:
    return run.shape.step_tokens / link_bound_seconds(run)


def _busiest_per_token(run: Run) -> float:
    return busiest_nbytes(run) / (run.shape.seq_len * run.shape.sequences)


def _medians(shares: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(each) for each in shares)


def _of(part: str, points: Iterable[Point]) -> list[Point]:
    return [point for point in points if point.task.part == part]
