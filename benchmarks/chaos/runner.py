"""Lets a chaos run happen: the schedule by the clock, everything undone in time, and one more commit at the end."""

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.chaos.attacks.catalogue import ATTACKS, is_attacker
from benchmarks.chaos.attacks.order import read_deeds
from benchmarks.chaos.config import ChaosConfig
from benchmarks.chaos.faults import Done, NoPlaceError, SkippedError, carry_out
from benchmarks.chaos.log import AnyRecord, Begun, ChaosLog, Committed, Ended, Exited, Healed, Struck, read_log
from benchmarks.chaos.observer import RunObserver
from benchmarks.chaos.schedule import Fault, make_schedule
from benchmarks.chaos.testbed import REFUSED_EXIT_CODE, Testbed
from thinpipe.core.errors import UserError

_LOOK_SECONDS, _PROGRESS_SECONDS = 0.05, 30.0
_AGAIN_SECONDS = 2.0
"""Who ended by itself is started again after so long; that it ended stays in the log."""
_REFUSALS = 2
"""An honest peer that is refused more often than this was removed for good, and is not started again."""
_FIRST_STEP_SECONDS = 240.0
_ATTACK_LATE_SECONDS = 60.0
"""An attack waits so long for a hostile member that is starting, is busy, or has no place."""
_DEED_SECONDS = 30.0
"""An attack of which nothing was sent this long after its time is ordered again, as long after that."""
_PLACE_SECONDS = 2.0
"""So long a peer is gone that was killed so that its place is free."""

Say = Callable[[str], None]


def run_schedule(config: ChaosConfig, say: Say) -> None:
    """To the end, from wherever the log says that it is."""
    config.folder.mkdir(parents=True, exist_ok=True)
    records = list(read_log(config.folder / "log.jsonl"))
    if records and isinstance(records[-1], Ended):
        return
    log = ChaosLog(config.folder / "log.jsonl")
    try:
        with Testbed(config) as bed:
            _ChaosRunner(config, bed, log, records, say).run()
    finally:
        log.close()


class _ChaosRunner:
    def __init__(self, config: ChaosConfig, bed: Testbed, log: ChaosLog, records: list[AnyRecord], say: Say) -> None:
        self._config, self._bed, self._log, self._say = config, bed, log, say
        self._elapsed = max((record.clock_s for record in records), default=0.0)
        self._began: float | None = None
        known = {record.step: record.files for record in records if isinstance(record, Committed)}
        self._watch = RunObserver(bed, self._tell, self._clock, known)
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._faults = [fault for fault in make_schedule(config) if fault.at > self._elapsed]
        self._refused: Counter[str] = Counter()
        """How often each honest program ended because it was refused."""
        self._place_made: set[Fault] = set()
        """Attacks for which a place was made."""
        self._said = time.monotonic()

    def _clock(self) -> float:
        return self._elapsed + (0.0 if self._began is None else time.monotonic() - self._began)

    def _now(self) -> dict[str, Any]:
        return {"time_s": time.time(), "clock_s": round(self._clock(), 3)}

    def _tell(self, record: AnyRecord) -> None:
        self._log.write(record)
        if isinstance(record, Exited):
            self._say(f"{record.who} ended by itself with {record.code}: {record.tail[-300:]}")
            self._refused[record.who] += record.code == REFUSED_EXIT_CODE
            if is_attacker(record.who) or self._refused[record.who] <= _REFUSALS:
                self._at(self._clock() + _AGAIN_SECONDS, lambda: self._bed.start_again(record.who))

    def run(self) -> None:
        self._bed.start()
        self._until(lambda: self._watch.executed > 0, _FIRST_STEP_SECONDS, "no step was computed")
        self._began = time.monotonic()
        self._log.write(Begun(**self._now(), command=self._config.command, seed=self._config.seed))
        for fault in self._faults:
            self._at(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        while self._clock() < 60 * self._config.minutes or self._due:
            self._turn()
        before, executed = self._watch.commits, self._watch.executed
        try:
            self._until(
                lambda: self._watch.commits > before and self._watch.executed > executed,
                self._config.finish_seconds,
                "when the faults were over, no further commit came",
            )
            problem = ""
        except UserError as error:
            problem = str(error)
        self._bed.end_all()
        self._watch.hash_disk()
        self._log.write(Ended(**self._now(), problem=problem))

    def _until(self, reached: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                raise UserError(f"{otherwise} within {seconds:.0f} s: see {self._bed.folder / 'printed'}")
            self._turn()

    def _turn(self) -> None:
        while self._due and self._due[0][0] <= self._clock():
            heapq.heappop(self._due)[2]()
        self._watch.poll()
        if time.monotonic() - self._said > _PROGRESS_SECONDS:
            self._said = time.monotonic()
            left = max(0.0, 60 * self._config.minutes - self._clock()) / 60
            self._say(f"step {self._watch.steps}, commit {self._watch.commits}; about {left:.0f} min of faults left")
        time.sleep(_LOOK_SECONDS)

    def _at(self, clock: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (clock, next(self._order), action))

    def _inject(self, fault: Fault) -> None:
        what: dict[str, Any] = {"kind": fault.kind, "victim": fault.victim, "seconds": fault.seconds, **self._now()}
        try:
            done = carry_out(self._bed, fault)
        except SkippedError as error:
            if fault.kind in ATTACKS and self._clock() < fault.at + _ATTACK_LATE_SECONDS:
                self._attack_later(fault, isinstance(error, NoPlaceError))
            else:
                self._log.write(Struck(**what, skipped=str(error)))
                if fault.kind in ATTACKS:
                    self._once_more(fault)
            return
        fault = replace(fault, victim=done.victim or fault.victim)
        what["victim"] = fault.victim
        self._log.write(Struck(**what, detail=done.detail))
        self._say(f"{self._clock():6.1f} s: {fault.kind} {fault.victim}, {fault.seconds:.1f} s {done.detail}")
        self._at(self._clock() + fault.seconds, lambda: self._undo_fault(fault, done))
        if fault.kind in ATTACKS:
            ordered = what["time_s"]
            self._at(
                self._clock() + fault.seconds + _DEED_SECONDS, lambda: self._again_unless_carried_out(fault, ordered)
            )

    def _again_unless_carried_out(self, attack: Fault, ordered: float) -> None:
        """A member that lost its place, or was killed, before it had sent anything has not attacked."""
        deeds = [
            deed
            for deed in read_deeds(self._config.attack_deeds)
            if deed.attack == attack.kind and deed.time_s >= ordered
        ]
        if any(not deed.problem for deed in deeds):
            return
        if not deeds and self._config.attack_order.exists():
            self._at(self._clock() + _AGAIN_SECONDS, lambda: self._again_unless_carried_out(attack, ordered))
        else:
            self._once_more(attack)

    def _once_more(self, attack: Fault) -> None:
        """Orders an attack again later, while there is time."""
        moment = self._clock() + _DEED_SECONDS
        if moment < 60 * self._config.minutes:
            self._at(moment, lambda: self._inject(replace(attack, at=moment)))

    def _attack_later(self, attack: Fault, no_place: bool) -> None:
        """Once for each attack a peer is killed, should there be no place."""
        members = self._bed.members()
        if no_place and members and attack not in self._place_made:
            self._place_made.add(attack)
            self._inject(Fault(self._clock(), "kill", members[-1], _PLACE_SECONDS))
        self._at(self._clock() + _AGAIN_SECONDS, lambda: self._inject(attack))

    def _undo_fault(self, fault: Fault, done: Done) -> None:
        detail = done.undo()
        if detail is None:
            self._at(self._clock() + _AGAIN_SECONDS, lambda: self._undo_fault(fault, done))
        else:
            self._log.write(Healed(**self._now(), kind=fault.kind, victim=fault.victim, detail=detail))
