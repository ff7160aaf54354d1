"""A hub, peers and a bad network without processes or sockets: the real roster, ballot and ledger, in simulated time.

The weights of a layer are the numbers of the steps that changed them, so a step that was lost or done twice is seen.
Everything that must never happen is asserted where it would happen.
"""

import hashlib
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import numerics
from thinpipe.swarm.assign import Assignment
from thinpipe.swarm.ballot import Ballot, VoteError
from thinpipe.swarm.broker_config import HUB
from thinpipe.swarm.commit_history import Commit, History, State
from thinpipe.swarm.commits import Commits
from thinpipe.swarm.messages import Measure, NextRequest
from thinpipe.swarm.reports import MachineReport, ProcessorReport
from thinpipe.swarm.roster import Epoch, Roster

NAMES = ("a", "b", "c", "d")
WANTED, MOST, PATIENCE = 3, 3, 5.0
LAYERS = ("first", "blocks.0", "blocks.1", "last")
INTERVAL, BASIS_INTERVAL = 2, 3
REPORT = MachineReport(
    processor=ProcessorReport(device="cpu", threads=1, flops=1e9, memory_nbytes=1 << 30),
    up_bps=5.0,
    down_bps=5.0,
    latency_s=0.1,
    versions={},
)


def sha(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def file_of(layer: str, applied: tuple[int, ...]) -> str:
    return f"{layer} {applied}"


def state_of(step: int, files: dict[str, str]) -> State:
    version = step // BASIS_INTERVAL
    return State(
        step=step, samples_seen=4 * step, basis_version=version, basis_sha256=sha(f"basis {version}"), files=files
    )


def undisturbed(step: int) -> State:
    return state_of(step, {layer: sha(file_of(layer, tuple(range(1, step + 1)))) for layer in LAYERS})


def assign_some(machines, _up, _down):
    names = sorted(machine.name for machine in machines)[:MOST]
    cuts = [len(LAYERS) * i // len(names) for i in range(len(names) + 1)]
    places = tuple((name, range(cuts[i], cuts[i + 1])) for i, name in enumerate(names))
    return Assignment(places=places, spares=(), too_small=(), loads=(), tokens_per_second=1.0, bottleneck="")


class HubCrashError(Exception):
    """The hub is no more; a new one has only what is on the disk."""


@dataclass
class Disk:
    """What outlives the hub."""

    epoch: int = 0
    log: list[Commit] = field(default_factory=list)
    folders: dict[int, tuple[Commit | None, dict[str, tuple[int, ...]]]] = field(
        default_factory=lambda: {0: (None, dict.fromkeys(LAYERS, ()))}
    )


@dataclass(frozen=True)
class Work:
    epoch: int
    names: tuple[str, ...]
    mine: tuple[str, ...]
    state: State
    weights: dict[str, tuple[int, ...]]


class SimulatedHub:
    """What `swarm/hub.py` and `train/hosting.py` do with the pure parts."""

    def __init__(self, world: "World") -> None:
        self.world, self.disk = world, world.disk
        newest = max(self.disk.folders)
        if newest > max((commit.step for commit in self.disk.log), default=0):
            commit, _ = self.disk.folders[newest]
            assert commit is not None
            self.log(commit)
        self.roster = Roster(WANTED, assign_some, patience_seconds=PATIENCE, last_epoch=self.disk.epoch)
        self.commits = Commits(History(self.disk.log), newest=newest)
        self.ballot: Ballot | None = None
        self.files: dict[tuple[int, str], tuple[int, ...]] = {}
        self.lost: set[str] = set()
        """Of those who began the epoch."""
        self.crash_between = False

    def log(self, commit: Commit) -> None:
        assert commit.step not in [earlier.step for earlier in self.disk.log], "committed twice"
        self.disk.log.append(commit)

    def gone(self, name: str) -> None:
        over = self.roster.gone(name, "lost")
        self._gone(name)
        self._over(over)

    def _gone(self, name: str) -> None:
        self.lost.add(name)
        self.commits.gone(name)

    def _over(self, why: str | None) -> None:
        if why is not None:
            self.ballot = None
            self.world.broadcast(("over", self.roster.last_epoch))

    def next(self, sender: "Process", request: NextRequest) -> Any:
        if self.roster.is_past(sender.name, request.life):
            return "refused"
        life = self.roster.life_of(sender.name)
        over = self.roster.asked(sender.name, request, self.world.now)
        if life not in (None, self.roster.life_of(sender.name)):
            self._gone(sender.name)
        self._over(over)
        before = self.roster.last_epoch
        found = self.roster.next_for(sender.name, self.world.now)
        if self.roster.last_epoch != before:
            self._begun()
        return self._work(sender.name, found) if isinstance(found, Epoch) else found

    def _begun(self) -> None:
        epoch = self.roster.current
        assert epoch.number > self.disk.epoch, "epochs only grow"
        self.disk.epoch = epoch.number
        self.commits.begin(epoch.number, epoch.names)
        self.files.clear(), self.lost.clear()
        self.beginning = self.commits.newest
        self.ballot = Ballot(epoch.number, epoch.names)
        self.world.lives[epoch.number] = {name: self.roster._peers[name].life for name in epoch.names}

    def _work(self, name: str, epoch: Epoch) -> Work:
        _, weights = self.disk.folders[self.beginning]
        mine = dict(epoch.assignment.places)[name]
        state = state_of(self.beginning, {layer: sha(file_of(layer, weights[layer])) for layer in LAYERS})
        return Work(epoch.number, tuple(epoch.names), tuple(LAYERS[i] for i in mine), state, weights)

    def vote(self, sender: "Process", asked: tuple[int, int, tuple[float, ...]]) -> Any:
        epoch, number, numbers = asked
        ballot = self.ballot
        if ballot is None:
            return "refused"
        counts = sender.name not in self.world.votes.get((ballot.epoch, number), {})
        try:
            ballot.give(sender.name, epoch, number, "sum", np.array(numbers))
        except VoteError:
            return "refused"
        if counts:
            self.world.is_of(sender, ballot.epoch)
            self.world.votes.setdefault((ballot.epoch, number), {})[sender.name] = numbers
        found = ballot.decision(number)
        return None if found is None else tuple(found.tolist())

    def saved(self, sender: "Process", asked: tuple[int, State, tuple[str, ...]]) -> str:
        epoch, state, files = asked
        latest = self.roster.latest
        if latest is None or latest.number != epoch or sender.name not in latest.names:
            return "refused"
        try:
            found = self.commits.told(sender.name, epoch, state, files, "", self.world.now)
        except UserError:
            return "refused"
        if found in ("begin", "send"):
            self.world.is_of(sender, self.commits.epoch)
            if found == "begin":
                self.world.told.clear(), self.world.promised.clear()
                self.files.clear()
            self.world.told[sender.name], self.world.promised[sender.name] = state, files
        self._commit_if_whole()
        return found

    def keep(self, sender: "Process", asked: tuple[int, str, tuple[int, ...]]) -> str:
        step, file, content = asked
        if step == self.commits.newest:
            return "whole"
        if not self.commits.expects(sender.name, step, file, self.world.now):
            return "refused"
        if sha(file_of(file, content)) != self.world.told[sender.name].files[file]:
            return "damaged"
        self.files[step, file] = content
        self.commits.came(sender.name, step, file)
        self._commit_if_whole()
        return "whole"

    def _commit_if_whole(self) -> None:
        commit = self.commits.whole
        if commit is None:
            return
        self.world.check_commit(commit, self.files)
        self.disk.folders[commit.step] = commit, {layer: self.files[commit.step, layer] for layer in LAYERS}
        if self.crash_between:
            raise HubCrashError
        if not self.commits.is_known(commit):
            self.log(commit)
        self.commits.committed(commit)
        self._over(self.roster.committed(commit.step))


@dataclass
class Saving:
    epoch: int
    state: State
    to_send: list[str]
    told: bool = False


class Process:
    """One life of a peer: asks what to do, votes, applies what was decided; beside that, sends what it has saved."""

    def __init__(self, world: "World", name: str, life: str) -> None:
        self.world, self.name, self.life = world, name, life
        self.report: MachineReport | None = None
        self.together: tuple[float, float] | None = None
        self.work: Work | None = None
        self.epoch, self.round, self.step = 0, 1, 0
        self.weights: dict[str, tuple[int, ...]] = {}
        self.gathering = self.over = self.ended = False
        self.faulty = self.lies = False
        self.saving: Saving | None = None
        self.waiting: Saving | None = None
        self.awaited: dict[str, int] = {}
        """The request of each kind whose answer counts: earlier ones have timed out."""

    def act(self) -> None:
        """What the main thread does next. What it has asked before is asked again."""
        if self.work is not None and self.over:
            if self.saving is None and self.waiting is None:
                self.work = None
        elif self.work is None:
            request = NextRequest(
                life=self.life,
                numerics=numerics(),
                report=self.report,
                took_part_in=self.epoch,
                together_bps=self.together,
            )
            self.world.send(self, "next", request)
        elif self.gathering:
            self._gather()
        else:
            self.world.send(self, "vote", (self.epoch, self.round, (float(self.faulty), float(self.step))))

    def act_keeper(self) -> None:
        if self.saving is None:
            self.saving, self.waiting = self.waiting, None
        saving = self.saving
        if saving is None:
            return
        if not saving.told:
            files = saving.state.files
            wrong = state_of(saving.state.step, files | {LAYERS[0]: sha(f"lie of {self.name}")})
            told = wrong if self.lies else saving.state
            self.world.send(self, "saved", (saving.epoch, told, tuple(saving.to_send)))
            self.lies = False
        elif saving.to_send:
            file = saving.to_send[0]
            content = self.world.folders[self.name].get(saving.state.step, {}).get(file)
            if content is None:
                self.saving = None
            else:
                self.world.send(self, "keep", (saving.state.step, file, content))
        else:
            self.saving = None

    def hear(self, kind: str, number: int, answer: Any) -> None:
        if kind == "over":
            self.over = self.over or (self.work is not None and answer == self.epoch)
            return
        if self.awaited.get(kind) != number:
            return
        del self.awaited[kind]
        getattr(self, f"_hear_{kind}")(answer)

    def _hear_next(self, answer: Any) -> None:
        self.together = None
        if answer == "refused":
            self.ended = True
        elif isinstance(answer, Measure) and answer.together:
            self.together = (1.0, 2.0)
        elif isinstance(answer, Measure):
            self.report = REPORT
        elif isinstance(answer, Work):
            self._begin(answer)

    def _begin(self, work: Work) -> None:
        assert work.epoch > self.epoch
        started = self.world.started.setdefault(work.epoch, work.state)
        assert started == work.state == undisturbed(work.state.step), "all begin from the same, with one basis"
        folder = self.world.folders[self.name]
        for step in [step for step in folder if step > work.state.step]:
            del folder[step]
        self.work, self.epoch, self.round, self.step = work, work.epoch, 1, work.state.step
        self.weights = {layer: work.weights[layer] for layer in work.mine}
        self.gathering = self.over = False

    def _hear_vote(self, answer: Any) -> None:
        if self.work is None or self.over or answer is None:
            return
        if answer == "refused":
            self.over = True
            return
        if answer[0] == 0:
            self.world.check_vote(self)
            self.step += 1
            self.weights = {layer: (*applied, self.step) for layer, applied in self.weights.items()}
            self.gathering = self.step % INTERVAL == 0
            if self.gathering:
                self.world.folders[self.name][self.step] = dict(self.weights)
                hashes = {layer: sha(file_of(layer, applied)) for layer, applied in self.weights.items()}
                self.world.board.setdefault((self.epoch, self.step), {})[self.name] = hashes
        self.faulty = False
        self.round += 1

    def _gather(self) -> None:
        """All hear the hashes of all; in a real epoch, from each other."""
        board = self.world.board[self.epoch, self.step]
        if set(board) == set(self.work.names):
            files = {layer: hashes[layer] for hashes in board.values() for layer in hashes}
            files = {layer: files[layer] for layer in LAYERS}
            self.waiting = Saving(self.epoch, state_of(self.step, files), list(self.weights))
            self.gathering = False

    def _hear_saved(self, answer: str) -> None:
        if answer == "refused" or (answer == "later" and self.waiting is not None):
            self.saving = None
        elif answer in ("begin", "send", "there") and self.saving is not None:
            self.saving.told = True

    def _hear_keep(self, answer: str) -> None:
        if self.saving is None or not self.saving.told:
            return
        if answer in ("refused", "damaged"):
            self.saving = None
        elif answer == "whole" and self.saving.to_send:
            self.saving.to_send.pop(0)


class World:
    """Everything, and what was seen so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.disk = Disk()
        self.folders: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {name: {} for name in NAMES}
        """The checkpoints that peers have themselves: they outlive their programs."""
        self.processes: list[Process] = []
        self.in_flight: list[tuple[Process, str, int, bool, Any]] = []
        """Process, kind, number of the request, whether it goes to the hub, contents."""
        self._numbers, self._lives = count(1), count(1)
        self.votes: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {}
        self.lives: dict[int, dict[str, str]] = {}
        self.started: dict[int, State] = {}
        self.board: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
        self.told: dict[str, State] = {}
        self.promised: dict[str, tuple[str, ...]] = {}
        self.hub = SimulatedHub(self)

    # What happens

    def start(self, name: str) -> None:
        self.processes.append(Process(self, name, f"{name}{next(self._lives)}"))

    def restart_hub(self, *, rotten: bool = False) -> None:
        """`rotten`: its newest checkpoint cannot be read any more."""
        if rotten and len(self.disk.folders) > 1:
            del self.disk.folders[max(self.disk.folders)]
        before = list(self.disk.log)
        self.told.clear(), self.promised.clear()
        self.hub = SimulatedHub(self)
        assert self.disk.log[: len(before)] == before

    def send(self, process: Process, kind: str, contents: Any) -> None:
        process.awaited[kind] = number = next(self._numbers)
        self.in_flight.append((process, kind, number, True, contents))

    def broadcast(self, message: tuple[str, int]) -> None:
        for process in self.processes:
            self.in_flight.append((process, message[0], 0, False, message[1]))

    def deliver(self, index: int) -> None:
        process, kind, number, to_hub, contents = self.in_flight.pop(index)
        if to_hub:  # also of processes that are dead by now
            try:
                answer = getattr(self.hub, kind)(process, contents)
            except HubCrashError:
                self.restart_hub()
                return
            self.in_flight.append((process, kind, number, False, answer))
        elif process in self.processes:
            process.hear(kind, number, contents)
            if process.ended:
                self.processes.remove(process)

    def calm(self) -> None:
        """A second in which everybody acts and everything arrives."""
        self.now += 1.0
        for name in self.hub.roster.present:
            if not any(process.name == name for process in self.processes):
                self.hub.gone(name)
        for process in list(self.processes):
            process.act()
            process.act_keeper()
        while self.in_flight:
            self.deliver(0)

    def in_words(self) -> str:
        roster = self.hub.roster
        processes = [
            f"{p.life} epoch {p.epoch} round {p.round} step {p.step}, over {p.over}, gathers {p.gathering}, {p.saving}"
            for p in self.processes
        ]
        commits = f"newest {self.hub.commits.newest}, arriving {self.hub.commits.arriving}"
        return "\n".join([f"{roster.current}, {roster._peers}, {commits}, now {self.now}", *processes])

    # What must hold

    def is_of(self, process: Process, epoch: int) -> None:
        lives = self.lives[epoch]
        assert lives.get(process.name) == process.life, "one that is not of the epoch has influence on it"
        assert process.epoch == epoch

    def check_vote(self, process: Process) -> None:
        """Just before it changes its weights."""
        votes = self.votes.get((process.epoch, process.round), {})
        assert set(votes) == set(process.work.names), "weights change without a vote of all"
        assert set(votes.values()) == {(0.0, float(process.step))}, "weights change although somebody was against it"

    def check_arriving(self) -> None:
        """Nobody sends parts of what can never be whole."""
        hub = self.hub
        if hub.commits.arriving is None or set(self.promised) != set(self.lives[hub.commits.epoch]):
            return  # somebody has still to tell what it has
        here = {file for step, file in hub.files if step == hub.commits.arriving}
        coming = {file for name, files in self.promised.items() if name not in hub.lost for file in files}
        assert here | coming == set(LAYERS), "all send what can never be whole"

    def check_commit(self, commit: Commit, files: dict[tuple[int, str], tuple[int, ...]]) -> None:
        assert commit.state == undisturbed(commit.step), "what is committed is not what an undisturbed run has"
        assert commit.epoch == self.disk.epoch
        assert set(self.told) == set(self.lives[commit.epoch]), "not all have told it"
        assert all(state == commit.state for state in self.told.values()), "they did not tell the same"
        for layer, expected in commit.files.items():
            *peers, hub = commit.holders[layer]
            assert hub == HUB
            assert peers, "one holder is not enough"
            held = [files[commit.step, layer], *(self.folders[name][commit.step][layer] for name in peers)]
            assert {sha(file_of(layer, content)) for content in held} == {expected}, "holders differ"
