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


class AttackResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all attacks of a kind."""

    attack: str
    ordered: int
    carried_out: int
    """The hostile member says that it has sent what it was to send."""
    computing: int
    """How often it had a part of the model when it was ordered to attack."""
    problems: list[str]
    """Why it could not."""
    must_be_named: bool
    named: int
    """How often the hub named it."""
    named_by: str
    """Words that did."""
    stopped_for: list[float]
    """Seconds without a step, where nothing but this attack happened."""
    struck_off: int
    harm: list[str]
    """To the run and to honest peers."""

    @property
    def failures(self) -> list[str]:
        unnamed = self.carried_out - self.named if self.must_be_named else 0
        found = [f"{unnamed} of {self.carried_out} times nobody was named"] if unnamed > 0 else []
        return [f"{self.attack}: {words}" for words in (*dict.fromkeys(self.harm), *found)]


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
    steps_compared: int
    """Those that the undisturbed run has computed too."""
    steps_unequal: list[int]
    """Loss or norm of the gradient differs from the undisturbed run: a message of another step, generation or
    incarnation would."""
    steps_skipped: int
    second_hubs_refused: int
    second_hubs_not_refused: list[str]
    second_hubs_undecided: int
    executing_after: list[float]
    """Seconds, of every outage by a fault."""
    executing_with_standby: list[float]
    """Of these, the outages in which an honest standby peer was connected, however many faults came together; without
    those of the hub."""
    executing_without_standby: list[float]
    """The others: no standby was there, or the hub was the victim."""
    executing_by_kind: dict[str, list[float]]
    """The same by what the fault was; `several` when they came together."""
    past_after: list[float]
    noticed_after: list[float]
    unexplained: list[str]
    """Outages by no fault: why the hub ended the generation."""
    exits: list[str]
    """Programs of the hub and of honest peers that ended by themselves."""
    raised: list[str]
    """Last lines of tracebacks that the hub printed."""
    honest_removed: list[str]
    """Words of the hub about honest peers that it removed."""
    attacks: list[AttackResult]
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
    shortfalls: list[str] = []
    """Where the run saw too little for a verdict (`floors`)."""

    @property
    def throughput_kept(self) -> float:
        return self.steps_per_second / self.clean_steps_per_second if self.clean_steps_per_second else 0.0

    @property
    def named_wrongly(self) -> int:
        """How often an honest peer was blamed, removed, or lost for nothing that we did to it."""
        lost = sum(" was lost: " in words for each in self.attacks for words in each.harm)
        return self.false_alarms + len(self.honest_removed) + lost

    @property
    def failures(self) -> list[str]:
        """What must not be, and what was too little to tell; empty when all is well."""
        return [*self.wrongs, *self.shortfalls]

    @property
    def wrongs(self) -> list[str]:
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
            "honest peers were removed": self.honest_removed,
            "exceptions that the hub did not expect": self.raised,
        }
        listed = [f"{len(what)} {name}{_listed(what)}" for name, what in found.items() if what]
        listed += [words for each in self.attacks for words in each.failures]
        return [*listed, self.problem] if self.problem else listed


def _listed(what: Sequence[object]) -> str:
    """A range is a mere count."""
    return "" if isinstance(what, range) else f": {', '.join(map(str, what))[:300]}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Of some values; of none it is nan."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
