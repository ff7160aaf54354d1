"""Who is there, and what each shall do next: wait, measure its line, or work. Pure: told of events and of the time.

An epoch is a set of peers computing together. It is over as soon as one of them is lost, leaves or asks what to do
next; then the others ask too, and when enough are there again the next epoch begins. Newcomers are measured while an
epoch runs; if it has fewer peers than wanted, it ends at the next commit so that they take part.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thinpipe.core.errors import UserError
from thinpipe.swarm.assign import Assignment, Machine
from thinpipe.swarm.messages import Measure, NextRequest
from thinpipe.swarm.reports import MachineReport

MOST_SECONDS_TO_SAVE = 1800.0
_LIVES_REMEMBERED = 100

Assigner = Callable[[Sequence[Machine], float, float], Assignment]
"""Of machines and the hub's rates up and down, in bits a second. Raises UserError when the model does not fit."""


@dataclass(frozen=True)
class Epoch:
    number: int
    assignment: Assignment
    lives: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.assignment.places]

    @property
    def shares(self) -> dict[str, int]:
        """How many segments each has."""
        return {name: len(segments) for name, segments in self.assignment.places}


@dataclass
class _Peer:
    life: str
    number: int
    """Of the life."""
    report: MachineReport | None
    epoch: int = 0
    """The last that it took part in."""
    together: tuple[float, float] | None = None
    """Up and down, while all measured at once."""
    measuring_together: bool = False
    """It was told to, or will be, and has not answered."""


@dataclass
class Roster:
    wanted: int
    """Peers for which the first epoch waits."""
    assigner: Assigner
    hub_bps: tuple[float, float] | None = None
    """Up and down: the hub's owner has said it, or all peers have measured at once. Once known it stays known."""
    patience_seconds: float = 60.0
    """How long later epochs wait for so many."""
    last_epoch: int = 0
    current: Epoch | None = None
    latest: Epoch | None = None
    """The current one, or the one that is over."""
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _lives: dict[str, int] = field(default_factory=dict)
    _last_life: dict[str, str] = field(default_factory=dict)
    """Also of those who are gone: they may come back, but not after another one was started."""
    _past: dict[str, deque[str]] = field(default_factory=dict)
    """Lives that another followed: what such a program asks is not heard, or the two would end each other's epochs."""
    _alone: str | None = None
    """Whose turn it is to measure."""
    _waiting_since: float | None = None
    _before: Epoch | None = None
    """What was the latest before that."""
    problem: str = ""
    """Why those who are there are not enough."""
    _not_enough: object = None
    """Those who are not: nothing is tried again with them."""

    @property
    def present(self) -> list[str]:
        return list(self._peers)

    @property
    def at_work(self) -> bool:
        """Somebody computes, or sends what it has saved."""
        return self.current is not None or bool(self._still_at_work)

    def life_of(self, name: str) -> str | None:
        """None: it is not there."""
        return self._peers[name].life if name in self._peers else None

    def report_of(self, name: str) -> MachineReport | None:
        return self._peers[name].report

    def asked(self, name: str, request: NextRequest, now: float) -> str | None:
        """A peer wants to know what to do. Returns why the current epoch is over, if that ends it."""
        if self.is_past(name, request.life):
            return None
        known = self._peers.get(name)
        over = None
        if known is None or known.life != request.life:
            self._lives[name] = self._lives.get(name, 0) + 1
            over = self._replaced(name, request.life)
            known = self._peers[name] = _Peer(request.life, self._lives[name], request.report)
        known.report = request.report or known.report  # a request that was late may be of before
        if self._alone == name and known.report is not None:
            self._alone = None
        if request.together_bps is not None and known.measuring_together:
            known.together, known.measuring_together = request.together_bps, False
            self._note_the_line()
        known.epoch = max(known.epoch, min(request.took_part_in, self.last_epoch))
        if self.current is not None and name in self.current.names and known.epoch >= self.current.number:
            over = over or f"{name} stopped: {request.why or 'it was asked to'}"
            self._end_epoch()
        if self.current is None:  # it has come out of the last one, or has never heard of it
            known.epoch = self.last_epoch
        if self._waiting_since is None:
            self._waiting_since = now
        return over

    def is_past(self, name: str, life: str) -> bool:
        """Another program of this peer was started after the one that asks."""
        return life in self._past.get(name, ())

    def is_now(self, name: str, life: str) -> bool:
        """It is the program that takes part for this peer."""
        return name in self._peers and self._peers[name].life == life

    def _replaced(self, name: str, life: str) -> str | None:
        last = self._last_life.get(name, life)
        if last != life:
            self._past.setdefault(name, deque(maxlen=_LIVES_REMEMBERED)).append(last)
        self._last_life[name] = life
        return self.gone(name, f"{name} was started again")

    def gone(self, name: str, why: str) -> str | None:
        """A peer is lost, kicked or has left. Returns why the current epoch is over, if that ends it."""
        self._peers.pop(name, None)
        self._note_the_line()
        if self._alone == name:
            self._alone = None
        if self.current is None or name not in self.current.names:
            return None
        self._end_epoch()
        return why

    def committed(self, step: int) -> str | None:
        """A state of this step is committed, so little is lost if the epoch ends now. Returns why it is over, if there
        were too few and others are ready to take part."""
        epoch = self.current
        if epoch is None or len(epoch.names) >= self.wanted or len(self._machines) <= len(epoch.names):
            return None
        try:
            places = self.assigner(self._machines, *self.hub_rates).places
        except UserError:
            return None
        new = [name for name, _ in places if name not in epoch.names]
        if len(places) <= len(epoch.names) or not new:
            return None
        self._end_epoch()
        return f"{' and '.join(new)} {'takes' if len(new) == 1 else 'take'} part from step {step} on"

    def end(self) -> bool:
        """The current epoch is over, and nobody is to blame. False: there was none."""
        there_was = self.current is not None
        self._end_epoch()
        return there_was

    def _end_epoch(self) -> None:
        self.current, self._waiting_since = None, None

    @property
    def _machines(self) -> list[Machine]:
        """Of all who are measured."""
        return [peer.report.machine(name) for name, peer in self._peers.items() if peer.report is not None]

    def next_for(self, name: str, now: float) -> Epoch | Measure | None:
        """None: it has to wait."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        if self.current is not None and name in self.current.names:
            return self._if_in_it(name, peer, self.current)
        if peer.measuring_together:  # whoever has come since: it waits for us
            return Measure(together=True)
        if peer.report is None:
            return self._measure_alone(name)
        if self.current is not None or not self._enough(now):
            return None
        if self.hub_bps is None and len(self._machines) > 1:
            return self._measure_together(peer)
        begun = self._begin()
        return None if begun is None else self._if_in_it(name, peer, begun)

    def _if_in_it(self, name: str, peer: _Peer, epoch: Epoch) -> Epoch | None:
        return epoch if name in epoch.names and peer.epoch < epoch.number else None

    def _measure_alone(self, name: str) -> Measure | None:
        """One after the other, also while others compute: so a spare is ready when it is needed."""
        if self._alone is None and not any(p.measuring_together for p in self._peers.values()):
            self._alone = name
        return Measure(together=False) if self._alone == name else None

    def call_off(self) -> None:
        """The epoch that has just begun, before anybody was told of it."""
        self.current, self.latest = None, self._before

    def _measure_together(self, peer: _Peer) -> Measure | None:
        if not any(p.measuring_together for p in self._peers.values()):
            for other in self._peers.values():
                other.together, other.measuring_together = None, other.report is not None
        return Measure(together=True) if peer.measuring_together else None

    def _note_the_line(self) -> None:
        """Once all have measured at once, or are gone. What peers download is what the hub sends."""
        measured = [peer.together for peer in self._peers.values() if peer.together is not None]
        if self.hub_bps is None and len(measured) > 1 and not any(p.measuring_together for p in self._peers.values()):
            self.hub_bps = sum(down for _, down in measured), sum(up for up, _ in measured)

    def _enough(self, now: float) -> bool:
        """The peers wanted are there, idle and measured; in later epochs, as many as computed (a spare took somebody's
        place), or those who came within our patience."""
        waited = now - self._waiting_since if self._waiting_since is not None else 0.0
        measured = len(self._machines)
        if self._still_at_work and waited < MOST_SECONDS_TO_SAVE:
            return False
        if self.last_epoch == 0:
            return measured >= self.wanted and measured == len(self._peers)
        computed = self.wanted if self.latest is None else len(self.latest.names)
        return measured >= min(self.wanted, computed) or waited >= self.patience_seconds

    @property
    def _still_at_work(self) -> list[str]:
        """Those of the epoch that is over who have not asked what to do next: they may be sending what they saved."""
        if self.latest is None:
            return []
        return [
            name
            for name in self.latest.names
            if name in self._peers
            and self._peers[name].number == self.latest.lives[name]
            and self._peers[name].epoch < self.latest.number
        ]

    def overdue(self, now: float) -> list[str]:
        """Those of them who have needed longer than sending may take: nothing more will come of them."""
        waited = now - self._waiting_since if self._waiting_since is not None else 0.0
        return self._still_at_work if self.current is None and waited >= MOST_SECONDS_TO_SAVE else []

    def _begin(self) -> Epoch | None:
        machines = self._machines
        if self._not_enough == (machines, self.hub_rates):
            return None
        try:
            assignment = self.assigner(machines, *self.hub_rates)
        except UserError as error:
            self.problem, self._not_enough = str(error), (machines, self.hub_rates)
            return None
        self.problem, self._not_enough = "", None
        self.last_epoch += 1
        lives = {name: self._peers[name].number for name, _ in assignment.places}
        self._before = self.latest
        self.current = self.latest = Epoch(self.last_epoch, assignment, lives)
        return self.current

    @property
    def hub_rates(self) -> tuple[float, float]:
        """Up and down."""
        return self.hub_bps or (float("inf"), float("inf"))

    @property
    def waits_for(self) -> str:
        """While no epoch goes on."""
        gone = [] if self.latest is None else [name for name in self.latest.names if name not in self._peers]
        if self.problem:
            return f"waiting for {', '.join(gone)}: {self.problem}" if gone else self.problem
        there = f"{len(self._peers)} of {self.wanted} peers are there"
        return f"{there}; waiting for {', '.join(gone)}" if gone else there

    def why_waiting(self, name: str) -> str:
        if self.problem:
            return self.waits_for
        if self.current is not None:
            fewer = ", or after the next commit" if len(self.current.names) < self.wanted else ""
            return f"the run goes on without {name}, which is a spare: it takes part when somebody leaves{fewer}"
        unmeasured = [other for other, peer in self._peers.items() if peer.report is None]
        if unmeasured:
            return f"machines are measured one after the other; still to come: {', '.join(unmeasured)}"
        return self.waits_for
