"""The page of `python -m benchmarks.chaos`: one table for each question, over all seeds in the folder."""

from collections.abc import Callable, Sequence

from benchmarks.chaos.attack_report import attack_table
from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES
from benchmarks.chaos.config import KINDS
from benchmarks.chaos.results import SEVERAL, SeedResult, percentile
from benchmarks.chaos.tables import row as _row

MIB = 2**20
TARGET_SECONDS = 15.0


def page(results: Sequence[SeedResult], facts: str) -> str:
    sections = [
        f"# python -m benchmarks.chaos\n\n{facts}",
        _verdict(results),
        "## What happened\n\n" + _faults(results),
        "## Are the weights those of the undisturbed run?\n\n" + _weights(results),
        "## What came of the attacks?\n\n" + attack_table(results),
        "## How long was nothing computed?\n\n" + _recovery(results),
        "## Memory and file handles\n\n" + _use(results),
    ]
    unexplained = [f"- seed {result.seed}: {words}" for result in results for words in result.unexplained]
    if unexplained:
        sections.append("## Generations that ended without a fault of ours\n\n" + "\n".join(unexplained))
    return "\n\n".join([*sections, "![steps over time](chaos.png)"]) + "\n"


def _verdict(results: Sequence[SeedResult]) -> str:
    if not any(result.failures for result in results):
        return "Nothing failed, and the floors of what must be seen are met (`benchmarks/chaos/floors.py`)."
    wrongs = [f"- seed {result.seed}: {wrong}" for result in results for wrong in result.wrongs]
    shortfalls = [f"- seed {result.seed}: {too_little}" for result in results for too_little in result.shortfalls]
    parts = ["**Failed:**", "\n".join(wrongs)] if wrongs else []
    if shortfalls:
        parts += ["**Failed, because it saw too little to tell:**", "\n".join(shortfalls)]
    again = "\n".join(f"    {result.command}" for result in results if result.failures)
    return "\n\n".join([*parts, "The same again:", again])


def _faults(results: Sequence[SeedResult]) -> str:
    kinds = [kind for kind in KINDS if any(result.faults.get(kind) for result in results)]
    rows: list[tuple[str, Callable[[SeedResult], float]]] = []
    for kind in kinds:
        rows.append((kind, lambda result, kind=kind: result.faults.get(kind, 0)))  # type: ignore[misc]
        if any(result.hits.get(kind) != result.faults.get(kind) for result in results):
            rows.append((f"{kind}, of one who computed", lambda result, kind=kind: result.hits.get(kind, 0)))  # type: ignore[misc]
    rows += [
        ("came back after it was given up", lambda result: result.zombie_returns),
        ("not done: the victim was away, the hostile member was busy or away", lambda result: result.skipped),
        ("minutes", lambda result: result.minutes),
    ]
    return _table("fault", results, rows, total=True)


def _weights(results: Sequence[SeedResult]) -> str:
    return _table(
        "",
        results,
        [
            ("commits compared, every layer", lambda result: result.commits),
            ("unequal", lambda result: len(result.commits_unequal)),
            ("commits lost", lambda result: len(result.commits_lost)),
            ("rolled back, with an event: both holders of a layer gone", lambda result: len(result.commits_given_up)),
            ("files on the hub's disk at the end, hashed", lambda result: result.files_on_disk),
            ("unequal", lambda result: len(result.files_unequal)),
            ("commits doubled", lambda result: len(result.commits_doubled)),
            ("steps computed", lambda result: result.steps_executed),
            ("of these, loss and norm compared", lambda result: result.steps_compared),
            ("unequal (a stale message would be)", lambda result: len(result.steps_unequal)),
            ("skipped", lambda result: result.steps_skipped),
            ("bad messages sent", lambda result: result.poisoned),
            ("of these, the sender was named", lambda result: result.poisoned_named),
            ("in one attempt with another that was named", lambda result: result.poisoned_together),
            ("in an attempt that another fault ended", lambda result: result.poisoned_overtaken),
            ("false alarms", lambda result: result.false_alarms),
            ("honest peers named wrongly", lambda result: result.named_wrongly),
            ("honest peers removed", lambda result: len(result.honest_removed)),
            ("second hubs refused", lambda result: result.second_hubs_refused),
            ("second hubs not refused", lambda result: len(result.second_hubs_not_refused)),
            ("second hubs undecided", lambda result: result.second_hubs_undecided),
            ("tracebacks that the hub printed", lambda result: len(result.raised)),
            ("programs that ended by themselves", lambda result: len(result.exits)),
        ],
        total=True,
    )


def _recovery(results: Sequence[SeedResult]) -> str:
    lists: dict[str, Callable[[SeedResult], list[float]]] = {
        "noticed by the hub": lambda result: result.noticed_after,
        "executing again": lambda result: result.executing_after,
        "executing again, a standby was there": lambda result: result.executing_with_standby,
        "executing again, no standby, or the hub was killed": lambda result: result.executing_without_standby,
        "past the highest step": lambda result: result.past_after,
        "given up, back: with us again": lambda result: result.rejoined_after,
    }
    heads = [f"seed {result.seed}" for result in results]
    lines = [_row(["seconds", *heads, "all"]), _row(["---", *["---:"] * (len(heads) + 1)])]
    for name, values_of in lists.items():
        groups = [values_of(result) for result in results]
        groups.append([value for group in groups for value in group])
        for percent in (50, 95):
            lines.append(_row([f"{name}, p{percent}", *(_seconds(group, percent) for group in groups)]))
    counts = [len(result.executing_after) for result in results]
    lines.append(_row(["outages", *map(str, counts), str(sum(counts))]))
    kept = [f"{result.throughput_kept:.0%}" for result in results]
    lines.append(_row(["throughput kept", *kept, f"{_kept(results):.0%}"]))
    for kind in (*KINDS, *ATTACK_NAMES, SEVERAL):
        of_kind = [value for result in results for value in result.executing_by_kind.get(kind, [])]
        if of_kind:
            each = [result.executing_by_kind.get(kind, []) for result in results]
            cells = [_both(values) for values in (*each, of_kind)]
            lines.append(_row([f"executing again after {kind}, p50 / p95", *cells]))
    with_standby = [value for result in results for value in result.executing_with_standby]
    reached = "met" if percentile(with_standby, 95) <= TARGET_SECONDS else "not met"
    return "\n".join(lines) + (
        f"\n\nTarget: executing again within {TARGET_SECONDS:g} s, p95, where a standby was there and the hub was not "
        f"the victim ({len(with_standby)} outages, also of several faults): {_seconds(with_standby, 95)}, {reached}."
    )


def _seconds(values: Sequence[float], percent: int) -> str:
    return f"{percentile(values, percent):.1f}" if values else "none"


def _both(values: Sequence[float]) -> str:
    return f"{_seconds(values, 50)} / {_seconds(values, 95)}" if values else ""


def _kept(results: Sequence[SeedResult]) -> float:
    return sum(result.throughput_kept * result.minutes for result in results) / sum(r.minutes for r in results)


def _use(results: Sequence[SeedResult]) -> str:
    lines = [
        _row(["", "longest life, min", "MiB first", "MiB last", "handles first", "handles last"]),
        _row(["---", *["---:"] * 5]),
    ]
    for result in results:
        for use in result.use:
            sizes = [f"{nbytes / MIB:.0f}" for nbytes in (use.first_rss_nbytes, use.last_rss_nbytes)]
            counts = [str(use.first_handles), str(use.last_handles)]
            lines.append(_row([f"seed {result.seed}, {use.who}", f"{use.minutes:.1f}", *sizes, *counts]))
    return "\n".join(lines)


def _table(
    head: str,
    results: Sequence[SeedResult],
    rows: Sequence[tuple[str, Callable[[SeedResult], float]]],
    *,
    total: bool,
) -> str:
    lines = [
        _row([head, *(f"seed {result.seed}" for result in results), *(["all"] if total else [])]),
        _row(["---", *["---:"] * (len(results) + total)]),
    ]
    for name, value_of in rows:
        values = [value_of(result) for result in results]
        lines.append(_row([name, *(f"{value:g}" for value in (*values, *([sum(values)] if total else [])))]))
    return "\n".join(lines)
