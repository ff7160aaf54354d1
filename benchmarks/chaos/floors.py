"""What a chaos run must have seen before it says anything: a minimum of speed, commits and comparisons, and each kind
of fault and attack at least once. A run that saw less has decided nothing, and that is a failure. Pure.

The floors were set before any run was judged by them. Three half hours with faults and without attacks had kept 65, 82
and 71 % of the clean speed; as many attacks as faults again may cost as much again, and half of what is left then is
asked for.
"""

from collections.abc import Iterator

from benchmarks.chaos.config import ChaosConfig
from benchmarks.chaos.results import SeedResult

KEPT = 0.25
"""Share of the clean speed."""
CLEAN_COMMITS_PER_MINUTE = 2.0
"""A slower machine shows too little in any time."""
DECIDED = 0.5
"""Share of the bad messages that must have been named, or have come together with one that was."""


def shortfalls(config: ChaosConfig, result: SeedResult) -> list[str]:
    return [*_too_little(config, result), *_undecided(config, result)]


def _too_little(config: ChaosConfig, result: SeedResult) -> Iterator[str]:
    clean = result.clean_steps_per_second
    per_minute = 60 * clean / config.steps_per_commit
    if per_minute < CLEAN_COMMITS_PER_MINUTE:
        yield (
            f"without faults {per_minute:.1f} commits a minute were made, fewer than {CLEAN_COMMITS_PER_MINUTE:g}: "
            "this machine is too slow or too busy for a verdict"
        )
    if result.throughput_kept < KEPT:
        yield f"{result.throughput_kept:.0%} of the clean speed was kept, less than {KEPT:.0%}"
    steps = KEPT * clean * 60 * config.minutes
    least = {
        "commits were compared": (result.commits, max(config.minutes, steps / config.steps_per_commit)),
        "steps were compared": (result.steps_compared, steps),
        "files on the hub's disk were hashed": (result.files_on_disk, 1),
    }
    for what, (found, floor) in least.items():
        if found < floor:
            yield f"{found} {what}, fewer than {floor:.0f}"


def _undecided(config: ChaosConfig, result: SeedResult) -> Iterator[str]:
    absent = [kind for kind in config.kinds if not result.faults.get(kind)]
    if absent:
        yield f"nothing of these kinds happened: {', '.join(absent)}"
    carried_out = {each.attack for each in result.attacks if each.carried_out}
    untried = [name for name in config.attacks if name not in carried_out]
    if untried:
        yield f"not carried out: {', '.join(untried)}"
    if result.second_hubs_undecided:
        yield f"{result.second_hubs_undecided} second hubs were neither refused nor accepted"
    named = result.poisoned_named + result.poisoned_together
    if "poison" in config.kinds and named < max(1, DECIDED * result.poisoned):
        yield f"of {result.poisoned} bad messages only {named} came to be judged"
