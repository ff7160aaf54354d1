"""What a run does now, on whose machines, and what limits its speed, each in a sentence. Pure."""

from collections.abc import Sequence

from thinpipe.monitor.snapshot import BoundaryTraffic, StageStatus

_BUSY, _WAITED = 0.8, 0.2
"""Share of a step from which a processor is what limits the speed; share of waiting for messages that is worth a
word."""
_NAMES = 6


def whose(stages: Sequence[StageStatus], *, has_hub: bool) -> str:
    """Names of those who compute, in pipeline order."""
    names = list(dict.fromkeys(stage.name for stage in stages if stage.is_connected))
    if not names:
        return "nobody yet"
    if not has_hub:
        return "this run's one process" if len(names) == 1 else f"{len(names)} processes of this run"
    if len(names) > _NAMES:
        names = [*names[: _NAMES - 1], f"{len(names) - _NAMES + 1} others"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def now_text(state: str, *, on: str, step: int, steps: int, has_stepped: bool, interruption: str) -> str:
    """`state` as of `Snapshot.state`; `on`: whose machines; `interruption`: why the last generation ended, if
    nothing has been computed since."""
    of = f" of {steps:,}" if steps else ""
    if state == "waiting":
        return "nothing has happened yet"
    if state == "recovering":
        return f"nothing is computed: {interruption}; the others make ready to go on"
    if state == "finished":
        return f"finished: all {steps:,} steps are done" if steps else "finished"
    if state != "running":
        return f"{state}, after step {step:,}{of}"
    if not has_stepped:
        return f"making ready on {on}: connecting and loading the model"
    return f"computing step {min(step + 1, steps) if steps else step + 1:,}{of} on {on}"


def limit_text(stages: Sequence[StageStatus], traffic: Sequence[BoundaryTraffic], promised: str) -> str:
    """What the last steps show; before the first step what the measurements promise. Empty: nothing is known."""
    timed = [stage for stage in stages if stage.busy is not None]
    if not timed:
        return f"expected from the measurements: {promised}" if promised else ""
    slowest = max(timed, key=lambda stage: stage.busy or 0.0)
    busy = slowest.busy or 0.0
    worst = max(traffic, key=lambda each: each.waited, default=None)
    if len(timed) == 1 or busy >= _BUSY:
        return f"the processor of {slowest.name}, busy for {busy:.0%} of a step"
    if worst is not None and worst.waited >= _WAITED:
        ends = [stage.name for at in (worst.boundary, worst.boundary + 1) for stage in stages if at in stage.segments]
        between = f"between {ends[0]} and {ends[1]}" if len(ends) == 2 else f"over boundary {worst.boundary}"
        return f"messages {between}: {worst.waited:.0%} of a step is spent waiting for them"
    return (
        f"no single machine: the busiest, {slowest.name}, computes for {busy:.0%} of a step. More micro-batches in "
        "flight would help"
    )
