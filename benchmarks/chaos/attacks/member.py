"""`python -m benchmarks.chaos.attacks.member join ...` is `thinpipe join ...`, except that it attacks when asked to.

Order and deeds are in the files that the environment names (`order`).
"""

import os
import runpy
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.chaos.attacks import floods, requests, training
from benchmarks.chaos.attacks.catalogue import ATTACKS, AttackName
from benchmarks.chaos.attacks.insider import Insider
from benchmarks.chaos.attacks.order import DEEDS, ORDER, SIGNAL, Order, taken, write_down

Function = Callable[[Insider, Order], str]
FUNCTIONS: dict[AttackName, Function] = {
    "headers_member": requests.headers_member,
    "headers_invite": requests.headers_invite,
    "headers_peer": requests.headers_peer,
    "words_of_hub": requests.words_of_hub,
    "malformed_messages": requests.malformed_messages,
    "malformed_frames": training.malformed_frames,
    "altered_frames": training.altered_frames,
    "old_incarnation": training.old_incarnation,
    "absurd_report": requests.absurd_report,
    "absurd_event": requests.absurd_event,
    "admin_requests": requests.admin_requests,
    "false_accusation": requests.false_accusation,
    "end_of_run": requests.end_of_run,
    "leaving_again": requests.leaving_again,
    "others_files": training.others_files,
    "phantom_checkpoint": requests.phantom_checkpoint,
    "spoilt_rendezvous": requests.spoilt_rendezvous,
    "nan_in_sum": training.nan_in_sum,
    "stall": training.stall,
    "flood_store": floods.flood_store,
    "flood_heartbeats": floods.flood_heartbeats,
    "flood_payloads": floods.flood_payloads,
    "flood_neighbour": floods.flood_neighbour,
}
assert FUNCTIONS.keys() == ATTACKS.keys()


def attack_when_asked(insider: Insider) -> None:
    """From now on the signal has this process carry out its order, one after the other, in a thread of its own."""
    asked = threading.Event()
    signal.signal(SIGNAL, lambda *_: asked.set())

    def obey() -> None:
        repeat_from_before(insider)
        while asked.wait():
            asked.clear()
            order = taken(Path(os.environ[ORDER]))
            carry_out(insider, order.attack, partial(FUNCTIONS[order.attack], insider, order))

    threading.Thread(target=obey, name="attacks", daemon=True).start()


def repeat_from_before(insider: Insider) -> None:
    if training.recording_path().exists():
        carry_out(insider, "old_incarnation", lambda: training.repeat_recorded(insider))


def carry_out(insider: Insider, attack: AttackName, deed: Callable[[], str]) -> None:
    deeds = Path(os.environ[DEEDS])
    detail = problem = ""
    try:
        detail = deed()
    except Exception as error:  # the hub hung up, or there was no place: it is written down, and the next order comes
        problem = f"{type(error).__name__}: {error}"
    name = insider.name if insider.process is not None else ""
    write_down(deeds, attack, name, detail, problem)
    Path(os.environ[ORDER]).unlink(missing_ok=True)


if __name__ == "__main__":
    insider = Insider()
    insider.watch()
    attack_when_asked(insider)
    runpy.run_module("thinpipe", run_name="__main__", alter_sys=True)
