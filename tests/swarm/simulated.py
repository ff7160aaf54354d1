"""A hub, peers and a bad network without processes or sockets: the real membership, reductions and ledger, in
simulated time.

The weights of a layer are the numbers of the steps that changed them, so a step that was lost or done twice is seen.
Everything that must never happen is asserted where it would happen.
"""

import hashlib
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import numerics
from thinpipe.planning.partition import Partition
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.hub.commits.ledger import CommitLedger, Part
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.hub.services.reduction import ReductionError, StepReduction
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.messages import Measure, NextRequest
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.signed_files import SignedFile

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


def state_of(step: int, files: dict[str, str]) -> CommitState:
    version = step // BASIS_INTERVAL
    return CommitState(
        step=step, samples_seen=4 * step, basis_version=version, basis_sha256=sha(f"basis {version}"), files=files
    )


def part_of(state: CommitState, files: dict[str, str]) -> Part:
    signed = {name: SignedFile(name=name, nbytes=1, sha256=sha256, signature=b"") for name, sha256 in files.items()}
    return Part(
        step=state.step,
        samples_seen=state.samples_seen,
        basis_version=state.basis_version,
        basis_sha256=state.basis_sha256,
        files=signed,
    )


def undisturbed(step: int) -> CommitState:
    return state_of(step, {layer: sha(file_of(layer, tuple(range(1, step + 1)))) for layer in LAYERS})


def partition_some(machines, _up, _down):
    names = sorted(machine.name for machine in machines)[:MOST]
    cuts = [len(LAYERS) * i // len(names) for i in range(len(names) + 1)]
    stages = tuple((name, range(cuts[i], cuts[i + 1])) for i, name in enumerate(names))
    return Partition(stages=stages, standbys=(), too_small=(), loads=(), tokens_per_second=1.0, bottleneck="")


class HubCrashError(Exception):
    """The hub is no more; a new one has only what is on the disk."""


@dataclass
class Disk:
    """What outlives the hub."""

    generation: int = 0
    log: list[Commit] = field(default_factory=list)
    folders: dict[int, tuple[Commit | None, dict[str, tuple[int, ...]]]] = field(
        default_factory=lambda: {0: (None, dict.fromkeys(LAYERS, ()))}
    )


@dataclass(frozen=True)
class PlannedWork:
    generation: int
    names: tuple[str, ...]
    mine: tuple[str, ...]
    state: CommitState
    weights: dict[str, tuple[int, ...]]


class SimulatedHub:
    """What `swarm/hub/server.py` and `swarm/hub/training_host.py` do with the pure parts."""

    def __init__(self, world: "World") -> None:
        self.world, self.disk = world, world.disk
        newest = max(self.disk.folders)
        if newest > max((commit.step for commit in self.disk.log), default=0):
            commit, _ = self.disk.folders[newest]
            assert commit is not None
            self.log(commit)
        self.membership = Membership(
            WANTED, partition_some, patience_seconds=PATIENCE, last_generation=self.disk.generation
        )
        self.commits = CommitLedger(CommitHistory(self.disk.log), newest=newest)
        self.reduction: StepReduction | None = None
        self.files: dict[tuple[int, str], tuple[int, ...]] = {}
        self.lost: set[str] = set()
        """Of those who began the generation."""
        self.crash_between = False

    def log(self, commit: Commit) -> None:
        assert commit.step not in [earlier.step for earlier in self.disk.log], "committed twice"
        self.disk.log.append(commit)

    def drop_peer(self, name: str) -> None:
        over = self.membership.drop_peer(name, "lost")
        self._gone(name)
        self._over(over)

    def _gone(self, name: str) -> None:
        self.lost.add(name)
        self.commits.drop_peer(name)

    def _over(self, end: GenerationEnd | None) -> None:
        if end is not None:
            self.reduction = None
            self.world.broadcast(("over", self.membership.last_generation))

    def next(self, sender: "Process", request: NextRequest) -> Any:
        if self.membership.present.is_superseded(sender.name, request.incarnation):
            return "refused"
        incarnation = self.membership.present.incarnation_of(sender.name)
        over = self.membership.on_next_request(sender.name, request, self.world.now)
        if incarnation not in (None, self.membership.present.incarnation_of(sender.name)):
            self._gone(sender.name)
        self._over(over)
        before = self.membership.last_generation
        found = self.membership.next_for(sender.name, self.world.now)
        if self.membership.last_generation != before:
            self._begun()
        return self._work(sender.name, found) if isinstance(found, Generation) else found

    def _begun(self) -> None:
        generation = self.membership.replicas[0].current
        assert generation.number > self.disk.generation, "generations only grow"
        self.disk.generation = generation.number
        self.held = {name: [LAYERS[i] for i in mine] for name, mine in generation.partition.stages}
        self.commits.begin(generation.number, self.held)
        self.files.clear(), self.lost.clear(), self.world.told.clear()
        self.beginning = self.commits.newest
        self.reduction = StepReduction(generation.number, generation.names)
        self.world.incarnations[generation.number] = {
            name: self.membership.present[name].incarnation for name in generation.names
        }

    def _work(self, name: str, generation: Generation) -> PlannedWork:
        _, weights = self.disk.folders[self.beginning]
        mine = dict(generation.partition.stages)[name]
        state = state_of(self.beginning, {layer: sha(file_of(layer, weights[layer])) for layer in LAYERS})
        return PlannedWork(generation.number, tuple(generation.names), tuple(LAYERS[i] for i in mine), state, weights)

    def reduce(self, sender: "Process", asked: tuple[int, int, tuple[float, ...]]) -> Any:
        generation, number, numbers = asked
        reduction = self.reduction
        if reduction is None:
            return "refused"
        counts = sender.name not in self.world.reductions.get((reduction.generation, number), {})
        try:
            reduction.contribute(sender.name, generation, number, "sum", np.array(numbers))
        except ReductionError:
            return "refused"
        if counts:
            self.world.is_of(sender, reduction.generation)
            self.world.reductions.setdefault((reduction.generation, number), {})[sender.name] = numbers
        found = reduction.result(number)
        return None if found is None else tuple(found.tolist())

    def saved(self, sender: "Process", asked: tuple[int, Part]) -> str:
        generation, part = asked
        latest = self.membership.replicas[0].latest
        if latest is None or latest.number != generation or sender.name not in latest.names:
            return "refused"
        foreign = self.commits.foreign_files(sender.name, part.files)
        part = replace(part, files={name: file for name, file in part.files.items() if name not in foreign})
        try:
            found = self.commits.announce(sender.name, generation, part, self.world.now)
        except UserError:
            return "refused"
        if found != "committed":
            self.world.is_of(sender, self.commits.generation)
            if found == "begin":
                self.files.clear()
            self.world.told[sender.name] = part
        self._commit_if_whole()
        return found

    def keep(self, sender: "Process", asked: tuple[int, str, tuple[int, ...]]) -> str:
        step, file, content = asked
        if step == self.commits.newest:
            return "whole"
        expected = self.commits.expected(sender.name, step, file)
        if expected is None:
            return "refused"
        if sha(file_of(file, content)) != expected.sha256:
            return "damaged"
        self.files[step, file] = content
        self.commits.on_file_received(sender.name, step, file)
        self._commit_if_whole()
        return "whole"

    def _commit_if_whole(self) -> None:
        commit = self.commits.complete
        if commit is None:
            return
        self.world.check_commit(commit, self.files)
        self.disk.folders[commit.step] = commit, {layer: self.files[commit.step, layer] for layer in LAYERS}
        if self.crash_between:
            raise HubCrashError
        if not self.commits.is_recorded(commit):
            self.log(commit)
        self.commits.mark_committed(commit)
        self._over(self.membership.on_commit())


@dataclass
class Saving:
    generation: int
    state: CommitState
    to_send: list[str]
    told: bool = False


class Process:
    """One life of a peer: asks what to do, reduces, applies what came out; beside that, sends what it has saved."""

    def __init__(self, world: "World", name: str, incarnation: str) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation
        self.report: MachineReport | None = None
        self.concurrent: tuple[float, float] | None = None
        self.work: PlannedWork | None = None
        self.generation, self.round, self.step = 0, 1, 0
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
                incarnation=self.incarnation,
                numerics=numerics(),
                report=self.report,
                left_generation=self.generation,
                concurrent_bps=self.concurrent,
            )
            self.world.send(self, "next", request)
        elif self.gathering:
            self._gather()
        else:
            self.world.send(self, "reduce", (self.generation, self.round, (float(self.faulty), float(self.step))))

    def act_uploader(self) -> None:
        if self.saving is None:
            self.saving, self.waiting = self.waiting, None
        saving = self.saving
        if saving is None:
            return
        if not saving.told:
            told = {layer: saving.state.files[layer] for layer in saving.to_send}
            told |= {LAYERS[0]: sha(f"lie of {self.name}")} if self.lies else {}
            self.world.send(self, "saved", (saving.generation, part_of(saving.state, told)))
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
            self.over = self.over or (self.work is not None and answer == self.generation)
            return
        if self.awaited.get(kind) != number:
            return
        del self.awaited[kind]
        getattr(self, f"_hear_{kind}")(answer)

    def _hear_next(self, answer: Any) -> None:
        self.concurrent = None
        if answer == "refused":
            self.ended = True
        elif isinstance(answer, Measure) and answer.concurrent:
            self.concurrent = (1.0, 2.0)
        elif isinstance(answer, Measure):
            self.report = REPORT
        elif isinstance(answer, PlannedWork):
            self._begin(answer)

    def _begin(self, work: PlannedWork) -> None:
        assert work.generation > self.generation
        started = self.world.started.setdefault(work.generation, work.state)
        assert started == work.state == undisturbed(work.state.step), "all begin from the same, with one basis"
        folder = self.world.folders[self.name]
        for step in [step for step in folder if step > work.state.step]:
            del folder[step]
        self.work, self.generation, self.round, self.step = work, work.generation, 1, work.state.step
        self.weights = {layer: work.weights[layer] for layer in work.mine}
        self.gathering = self.over = False

    def _hear_reduce(self, answer: Any) -> None:
        if self.work is None or self.over or answer is None:
            return
        if answer == "refused":
            self.over = True
            return
        if answer[0] == 0:
            self.world.check_reduction(self)
            self.step += 1
            self.weights = {layer: (*applied, self.step) for layer, applied in self.weights.items()}
            self.gathering = self.step % INTERVAL == 0
            if self.gathering:
                self.world.folders[self.name][self.step] = dict(self.weights)
                hashes = {layer: sha(file_of(layer, applied)) for layer, applied in self.weights.items()}
                self.world.board.setdefault((self.generation, self.step), {})[self.name] = hashes
        self.faulty = False
        self.round += 1

    def _gather(self) -> None:
        """All hear the hashes of all; in a real generation, from each other."""
        board = self.world.board[self.generation, self.step]
        if set(board) == set(self.work.names):
            files = {layer: hashes[layer] for hashes in board.values() for layer in hashes}
            files = {layer: files[layer] for layer in LAYERS}
            self.waiting = Saving(self.generation, state_of(self.step, files), list(self.weights))
            self.gathering = False

    def _hear_saved(self, answer: str) -> None:
        if answer == "refused" or (answer == "retry" and self.waiting is not None):
            self.saving = None
        elif answer in ("begin", "send", "committed") and self.saving is not None:
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
        self._numbers, self._incarnation_counts = count(1), count(1)
        self.reductions: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {}
        self.incarnations: dict[int, dict[str, str]] = {}
        self.started: dict[int, CommitState] = {}
        self.board: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
        self.told: dict[str, Part] = {}
        self.hub = SimulatedHub(self)

    # What happens

    def start(self, name: str) -> None:
        self.processes.append(Process(self, name, f"{name}{next(self._incarnation_counts)}"))

    def restart_hub(self, *, rotten: bool = False) -> None:
        """`rotten`: its newest checkpoint cannot be read any more."""
        if rotten and len(self.disk.folders) > 1:
            del self.disk.folders[max(self.disk.folders)]
        before = list(self.disk.log)
        self.told.clear()
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
        for name in list(self.hub.membership.present):
            if not any(process.name == name for process in self.processes):
                self.hub.drop_peer(name)
        for process in list(self.processes):
            process.act()
            process.act_uploader()
        while self.in_flight:
            self.deliver(0)

    def in_words(self) -> str:
        membership = self.hub.membership
        processes = [
            f"{p.incarnation} generation {p.generation} round {p.round} step {p.step}, over {p.over}, gathers "
            f"{p.gathering}, {p.saving}"
            for p in self.processes
        ]
        commits = f"newest {self.hub.commits.newest}, arriving {self.hub.commits.pending_step}"
        return "\n".join(
            [f"{membership.replicas[0].current}, {membership.present}, {commits}, now {self.now}", *processes]
        )

    # What must hold

    def is_of(self, process: Process, generation: int) -> None:
        incarnations = self.incarnations[generation]
        assert incarnations.get(process.name) == process.incarnation, (
            "one that is not of the generation has influence on it"
        )
        assert process.generation == generation

    def check_reduction(self, process: Process) -> None:
        """Just before it changes its weights."""
        reductions = self.reductions.get((process.generation, process.round), {})
        assert set(reductions) == set(process.work.names), "weights change without the numbers of all"
        assert set(reductions.values()) == {(0.0, float(process.step))}, (
            "weights change although somebody was against it"
        )

    def check_pending(self) -> None:
        """Nobody sends parts of what can never be whole."""
        hub = self.hub
        if hub.commits.pending_step is None:
            return
        here = {file for step, file in hub.files if step == hub.commits.pending_step}
        coming = {file for name, files in hub.held.items() if name not in hub.lost for file in files}
        assert here | coming == set(LAYERS), "all send what can never be whole"

    def check_commit(self, commit: Commit, files: dict[tuple[int, str], tuple[int, ...]]) -> None:
        assert commit.state == undisturbed(commit.step), "what is committed is not what an undisturbed run has"
        assert commit.generation == self.disk.generation
        told = [self.told[name] for name in self.incarnations[commit.generation]]
        assert all(part.step >= commit.step for part in told), "not all have told it"
        for layer, expected in commit.files.items():
            *peers, hub = commit.holders[layer]
            assert hub == HUB
            assert peers, "one holder is not enough"
            held = [files[commit.step, layer], *(self.folders[name][commit.step][layer] for name in peers)]
            assert {sha(file_of(layer, content)) for content in held} == {expected}, "holders differ"
