"""Whom the hub believes when a step is bad: who is suspended, who loses its key, and when the run itself is the cause.

Every piece of evidence names the peers of which one must be at fault; bad values in a message are the receiver's word
against the sender's, so both are suspects. The rules need no trust in any one peer:

- A suspect is suspended, and the same steps are computed without it. Who has been in such a pair with more different
  peers is suspended first; in a first pair it is the sender, then each in turn.
- The cause is the run itself when no single peer is suspect in all evidence of the same steps.
- A key is struck off when strictly more than half of the other peers, and at least two, have found bad values in what
  that peer had sent, each in other steps. So in a run of two nobody can strike off the other.
- Who ends three generations by itself without a commit in between is suspended.

Pure: `now` is in seconds of a monotonic clock. Forgotten when the hub is started again.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from thinpipe.swarm.hub.step_record import Finding
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.protocol.messages import NEAR_STEPS, is_near

MAX_ENDS_WITHOUT_COMMIT = 3
"""Ends of generations that a peer may cause by itself between two commits before it is suspended."""
MAX_TRIES = 4
"""Number of times that the same steps are tried when the suspects are needed to hold the model."""


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What the hub does after a generation has ended."""

    reason: str
    """What was found, in words."""
    suspended: str = ""
    """Peer that is suspended; empty: none."""
    seconds: float = 0.0
    """For how long."""
    by: str = ""
    """The peer whose word it is; empty: the hub has seen it itself."""
    expelled: str = ""
    """Peer whose key is struck off."""
    stop: str = ""
    """Why the run cannot go on, in words; empty: it goes on."""


@dataclass
class _Case:
    """Bad values in the same steps, in one generation after the other."""

    step: int
    suspects: frozenset[str]
    tries: int = 1
    suspended: set[str] = field(default_factory=set)


class Suspects:
    """`suspensions` also says who takes part, see `Membership`."""

    def __init__(self, suspensions: Suspensions) -> None:
        self.suspensions = suspensions
        self.diverged_steps: list[int] = []
        """See `messages.Assignment`."""
        self._case: _Case | None = None
        self._counterparts: defaultdict[str, set[str]] = defaultdict(set)
        """Peers with which each peer was suspect, one of the two being at fault."""
        self._finders: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Peers that have found bad values in what each peer had sent, with the last step of each."""
        self._ends: Counter[str] = Counter()
        """Ends of generations since the last commit, by the peer that caused them."""

    def on_commit(self, step: int) -> None:
        """The run has got past what went wrong before this step."""
        self._ends.clear()
        if self._case is not None and step >= self._case.step + NEAR_STEPS:
            self._case = None
        self.diverged_steps = [each for each in self.diverged_steps if each + NEAR_STEPS > step]

    def on_offence(self, name: str, what: str, now: float) -> Ruling:
        """A peer did what no honest peer does, and the hub has seen it."""
        return self._suspend(name, what, now)

    def on_end(self, name: str, reason: str, now: float, *, accused: str = "") -> Ruling | None:
        """One peer has ended a generation by what it said or did, which nothing else confirms. `accused`: another that
        may be to blame instead."""
        involved = [each for each in (name, accused) if each]
        self._ends.update(involved)
        if accused:
            self._pair(name, accused)
        found = [each for each in involved if self._ends[each] >= MAX_ENDS_WITHOUT_COMMIT]
        if not found:
            return None
        chosen = self._choose(found, accused)
        times = self._ends.pop(chosen)
        why = f"{times} generations without a commit between them ended because of it (the last: {reason})"
        return self._suspend(chosen, why, now, by=name if chosen == accused else "")

    def on_finding(self, finding: Finding, names: Collection[str], now: float, *, members: int) -> Ruling:
        """The sums of a generation's steps show bad values. `names`: its peers. `members`: number of peers that the run
        has."""
        case = self._open(finding)
        reason = describe(finding)
        if not case.suspects or members == 1:
            return self._diverged(case, finding, reason)
        if finding.accuser and finding.accuser != finding.accused:
            self._pair(finding.accuser, finding.accused)
            self._finders[finding.accused][finding.accuser] = finding.step
        if case.tries > MAX_TRIES:
            return Ruling(reason=reason, stop=_undecided(case.suspects, reason))
        chosen = self._choose(case.suspects, finding.accused)
        self._exonerate(chosen, case)
        if chosen == finding.accused and self._enough(chosen, names):
            self.forget(chosen)
            return Ruling(reason=reason, expelled=chosen)
        case.suspended.add(chosen)
        return self._suspend(chosen, reason, now, by=finding.accuser if chosen == finding.accused else "")

    def forget(self, name: str) -> None:
        """The peer is no longer a member."""
        self.suspensions.forget(name)
        self._counterparts.pop(name, None)
        self._finders.pop(name, None)
        del self._ends[name]

    def _exonerate(self, chosen: str, case: _Case) -> None:
        """Lifts suspensions that `chosen` explains: of peers that the same steps have cleared, and of those that were
        in a pair with nobody else."""
        cleared = case.suspended - case.suspects
        if len(self._counterparts[chosen]) > 1:
            cleared |= {name for name in self.suspensions.until if self._counterparts[name] == {chosen}}
        for name in sorted(cleared):
            self.suspensions.lift(name, f"{chosen} is suspected instead")

    def _open(self, finding: Finding) -> _Case:
        """The case to which a finding belongs."""
        case = self._case
        if case is None or not is_near(finding.step, [case.step]):
            self._case = case = _Case(finding.step, finding.suspects)
        else:
            case.suspects &= finding.suspects
            case.tries += 1
        return case

    def _diverged(self, case: _Case, finding: Finding, reason: str) -> Ruling:
        """No single peer explains what was found: nobody is suspected any more, and the steps are skipped. The run
        stops if they were."""
        paired = {name for name in self.suspensions.until if self._counterparts[name]}
        for name in sorted(paired | case.suspended):
            self.suspensions.lift(name, "the run itself has diverged")
        self._counterparts.clear()
        self._finders.clear()
        self.diverged_steps = sorted({*self.diverged_steps, case.step, finding.step})
        return Ruling(reason=reason, stop="not_finite" if finding.skipped else "")

    def _pair(self, one: str, other: str) -> None:
        self._counterparts[one].add(other)
        self._counterparts[other].add(one)

    def _choose(self, suspects: Collection[str], accused: str) -> str:
        """The suspect that has been in a pair with the most others, then who was suspended least often, then who is
        accused."""

        def suspicion(name: str) -> tuple[int, int, bool]:
            return len(self._counterparts[name]), -self.suspensions.counts[name], name == accused

        return max(sorted(suspects), key=suspicion)

    def _enough(self, name: str, names: Collection[str]) -> bool:
        """True if enough peers have found bad values in what this peer had sent. Who is suspended does not count,
        and findings in steps near each other count once: a run that has diverged is bad at the same steps again."""
        steps = sorted(step for finder, step in self._finders[name].items() if finder not in self.suspensions)
        apart = [step for index, step in enumerate(steps) if not index or step >= steps[index - 1] + NEAR_STEPS]
        return len(apart) >= 2 and 2 * len(apart) > len(set(names) - {name})

    def _suspend(self, name: str, reason: str, now: float, *, by: str = "") -> Ruling:
        seconds = self.suspensions.suspend(name, reason, now)
        return Ruling(reason=reason, suspended=name, seconds=seconds, by=by)


def describe(finding: Finding) -> str:
    """What was found, in words, with the names of all suspects."""
    if finding.skipped:
        where = f"first in the part of {finding.accused}" if finding.accused else "in several parts"
        found = f", found by {finding.accuser}" if finding.accuser else ""
        return f"three steps in a row from step {finding.step} were skipped ({where}: {finding.what}{found})"
    return (
        f"{finding.accuser} says that {finding.accused} sent bad values twice in step {finding.step} ({finding.what})"
    )


def _undecided(suspects: Collection[str], reason: str) -> str:
    who = " or ".join(sorted(suspects))
    return (
        f"{reason}, again and again, and the run cannot do without {who}: remove who is at fault (`thinpipe kick`) or "
        "invite another machine; if both are sound the run has diverged: lower optimizer.lr"
    )
