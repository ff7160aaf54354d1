"""Carries out faults with real signals and real cuts, and says how each is undone."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.chaos import small_disks as chaos_disk
from benchmarks.chaos.attacks import order
from benchmarks.chaos.attacks.catalogue import ATTACKS, AttackName
from benchmarks.chaos.config import HUB, Kind
from benchmarks.chaos.processes import Program
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.testbed import REFUSED_EXIT_CODE, Testbed
from thinpipe.core.run_folder import checkpoints_path, step_folder, step_folders

REFUSED = "refused"
"""What the detail of a second hub that was turned away begins with."""
UNDECIDED = "was neither refused nor did it print anything"
"""What the detail of a second hub begins with that was still starting after a long time."""
_DECIDED_SECONDS = 300.0
_ENDING_SECONDS = 10.0
"""A second hub that has said why it is refused ends within this time, on a machine that is busy."""


class SkippedError(Exception):
    """The fault cannot happen to this victim now."""


class NoPlaceError(SkippedError):
    """The hostile member would need a part of the model for this."""


@dataclass(frozen=True)
class Done:
    """What was done; `undo` returns what there is to say of it, and is called after the fault's seconds; again and
    again while it returns None."""

    undo: Callable[[], str | None]
    detail: str = ""
    victim: str | None = None
    """If it was another than the schedule's."""


Carry = Callable[[Testbed, Fault], Done]


def carry_out(bed: Testbed, fault: Fault) -> Done:
    """Raises SkippedError."""
    if fault.kind in ATTACKS:
        return _attack(bed, fault)
    return FAULTS[fault.kind](bed, fault)  # type: ignore[index]


def _running(bed: Testbed, name: str) -> Program:
    program = bed.programs[name]
    if not program.running:
        raise SkippedError(f"{name} does not run")
    return program


def _computing(bed: Testbed, wanted: str) -> str:
    """The wanted peer, or a member of the generation in its place: a standby neither sends nor computes."""
    members = bed.members()
    return wanted if wanted in members or not members else members[bed.index(wanted) % len(members)]


def _kill(bed: Testbed, fault: Fault) -> Done:
    _running(bed, fault.victim).kill()
    return Done(lambda: bed.start_again(fault.victim))


def _stop(bed: Testbed, fault: Fault) -> Done:
    program = _running(bed, fault.victim)
    if program.stopped:
        raise SkippedError(f"{fault.victim} is stopped already")
    program.signal(signal.SIGSTOP)

    def go_on() -> str:
        if not program.running:
            return "was killed meanwhile"
        program.signal(signal.SIGCONT)
        return ""

    return Done(go_on)


def _cut(bed: Testbed, fault: Fault) -> Done:
    networks, index = bed.networks, bed.index(fault.victim)
    if networks is None:
        raise SkippedError("there are no networks to cut")
    if index in networks.dead:
        raise SkippedError(f"the link of {fault.victim} is cut already")
    _running(bed, fault.victim)
    networks.cut(index, fault.kind)  # type: ignore[arg-type]

    def mend() -> str:
        networks.mend(index)
        return ""

    return Done(mend)


def _kill_hub(bed: Testbed, _fault: Fault) -> Done:
    for other in bed.others:  # a second hub that waits for the folder would be the first now
        other.kill(with_children=True)
    _running(bed, HUB).kill(with_children=True)
    return Done(lambda: bed.start_again(HUB))


def _second_hub(bed: Testbed, _fault: Fault) -> Done:
    _running(bed, HUB)
    second, deadline, printed_at = bed.start_second_hub(), time.monotonic() + _DECIDED_SECONDS, 0.0

    def look() -> str | None:
        nonlocal second, printed_at
        if second.ended_by_us:  # killed with the first one
            if not bed.programs[HUB].running:
                return None
            bed.others.remove(second)
            second = bed.start_second_hub()
        if second.printed and not printed_at:
            printed_at = time.monotonic()
        may_still_end = not printed_at or time.monotonic() < printed_at + _ENDING_SECONDS
        if second.running and may_still_end and time.monotonic() < deadline:
            return None
        bed.others.remove(second)
        printed, by_itself = second.printed, not second.running and not second.ended_by_us
        code = second.process.returncode if by_itself else None
        second.kill(with_children=True)
        if code == REFUSED_EXIT_CODE:
            return f"{REFUSED}: {printed.strip()}"
        return f"it was not: {second.tail}" if printed or by_itself else UNDECIDED

    return Done(look)


def _lose_layer(bed: Testbed, fault: Fault) -> Done:
    """Then somebody is killed, so that the layer is needed."""
    folders = step_folders(checkpoints_path(bed.dump_folder))
    commits = [path for path in folders if path.name != step_folder(0)]
    layers = sorted(commits[0].glob("*.safetensors")) if commits else []
    if not layers:
        raise SkippedError("there is no commit yet")
    victim = _computing(bed, fault.victim)
    _running(bed, victim)
    lost = random.Random(f"{fault.at}").choice(layers)
    try:
        lost.unlink()
    except FileNotFoundError:
        raise SkippedError("the newest commit is another by now") from None
    done = _kill(bed, replace(fault, victim=victim))
    return Done(done.undo, detail=f"{lost.parent.name}/{lost.name}", victim=victim)


def _poison(bed: Testbed, fault: Fault) -> Done:
    victim = _computing(bed, fault.victim)
    program = _running(bed, victim)
    if not program.catches(signal.SIGUSR1):
        raise SkippedError(f"{victim} cannot be poisoned: it has just begun")
    program.signal(signal.SIGUSR1)
    return Done(lambda: "", victim=victim)


def _fill_disk(bed: Testbed, fault: Fault) -> Done:
    folder = bed.dump_folder if fault.victim == HUB else bed.home(fault.victim)
    chaos_disk.fill(folder)

    def empty() -> str:
        chaos_disk.empty(folder)
        return ""

    return Done(empty)


def _attack(bed: Testbed, fault: Fault) -> Done:
    if not bed.attacker:
        raise SkippedError("the hostile member has used up its invites")
    program = _running(bed, bed.attacker)
    if not program.catches(order.SIGNAL):
        raise SkippedError(f"{bed.attacker} has just begun")
    if bed.config.attack_order.exists():
        raise SkippedError(f"{bed.attacker} is attacking already")
    name: AttackName = fault.kind  # type: ignore[assignment]
    if ATTACKS[name].computes and bed.attacker not in bed.members():
        raise NoPlaceError(f"{bed.attacker} computes nothing")
    order.give(bed.config.attack_order, order.Order(attack=name, seconds=fault.seconds, invite=bed.unused_invite))
    program.signal(order.SIGNAL)
    return Done(lambda: "", victim=bed.attacker)


FAULTS: dict[Kind, Carry] = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "deaf": _cut,
    "mute": _cut,
    "hub": _kill_hub,
    "second_hub": _second_hub,
    "store": _lose_layer,
    "disk": _fill_disk,
    "poison": _poison,
}
