"""What a chaos run came to: the numbers of one seed, and which of them must not be."""

import statistics
from collections.abc import Sequence

import msgspec

SEVERAL = "several"
"""The kind of an outage in which more than one fault happened."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and open files of one program, over its longest incarnation."""

    who: str
    minutes: float
    first_rss_nbytes: int
    last_rss_nbytes: int
    first_handles: int
    last_handles: int


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    minutes: float
    command: str
    faults: dict[str, int]
    """By kind, those that happened."""
    hits: dict[str, int]
    """Of these, those that happened to somebody who computed, or to the hub."""
    skipped: int
    zombie_returns: int
    rejoined_after: list[float]
    """Seconds, of those who came back after they were given up."""
    commits: int
    commits_unequal: list[int]
    commits_lost: list[int]
    """After which the run went on from an earlier one without an event that says so."""
    commits_given_up: list[str]
    """A layer was lost at the hub while the only other peer that had it was absent: text of the hub's event."""
    commits_doubled: list[int]
    files_on_disk: int
    """Of the hub, hashed at the end."""
    files_unequal: list[str]
    steps_executed: int
    steps_unequal: list[int]
    """Loss or norm of the gradient differs from the undisturbed run: a message of another step, generation or
    incarnation would."""
    steps_skipped: int
    second_hubs_refused: int
    second_hubs_not_refused: list[str]
    executing_after: list[float]
    """Seconds, of every outage by a fault."""
    executing_with_standby: list[float] = msgspec.field(name="executing_with_spare")
    """Of these, the outages in which a standby peer was connected, however many faults came together; without
    those of the hub."""
    executing_by_kind: dict[str, list[float]]
    """The same by what the fault was; `several` when they came together."""
    past_after: list[float]
    noticed_after: list[float]
    unexplained: list[str]
    """Outages by no fault: why the hub ended the generation."""
    exits: list[str]
    """Programs that ended by themselves."""
    clean_steps_per_second: float
    steps_per_second: float
    poisoned: int
    poisoned_named: int
    poisoned_together: int
    """Came in one attempt with another bad message, whose sender was named."""
    poisoned_overtaken: int
    """In an attempt that another fault ended: its step was never reduced."""
    false_alarms: int
    use: list[Usage]
    problem: str

    @property
    def throughput_kept(self) -> float:
        return self.steps_per_second / self.clean_steps_per_second if self.clean_steps_per_second else 0.0

    @property
    def failures(self) -> list[str]:
        """What must not be; empty when all is well."""
        found: dict[str, Sequence[object]] = {
            "commits differ from the undisturbed run": self.commits_unequal,
            "commits are lost": self.commits_lost,
            "commits came twice": self.commits_doubled,
            "files on the hub's disk differ from the undisturbed run": self.files_unequal,
            "steps differ from the undisturbed run": self.steps_unequal,
            "a second hub was not refused": self.second_hubs_not_refused,
            "poisoned messages were not named": range(
                self.poisoned - self.poisoned_named - self.poisoned_together - self.poisoned_overtaken
            ),
            "false alarms": range(self.false_alarms),
            "programs ended by themselves": self.exits,
        }
        listed = [f"{len(what)} {name}: {', '.join(map(str, what))[:300]}" for name, what in found.items() if what]
        return [*listed, self.problem] if self.problem else listed


def percentile(values: Sequence[float], percent: int) -> float:
    """Of some values; of none it is nan."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
