"""Where the hostile member computes: it changes its frames, its share of a sum and its files, stands still, and repeats
what it said before its last start."""

import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.chaos.attacks.insider import PLACE_SECONDS, Insider
from benchmarks.chaos.attacks.order import ORDER, Order
from thinpipe.checkpoint.storage import FileEntry
from thinpipe.core.files import file_sha256, write_atomically
from thinpipe.core.run_folder import step_folder
from thinpipe.swarm.peer.file_transfer import fetch, stat
from thinpipe.swarm.protocol.messages import LeaveRequest
from thinpipe.transport.nats.activity import Heartbeat

_LOOK_SECONDS, _STATUS_SECONDS = 0.05, 1.0


class _Recording(msgspec.Struct):
    """What a process sent before it started itself again."""

    incarnation: str
    generation: int
    sent: list[tuple[str, str, str, bytes]]


def recording_path() -> Path:
    return Path(os.environ[ORDER]).with_name("attack-recording.msgpack")


def altered_frames(insider: Insider, _order: Order) -> str:
    def flip(frame: bytes) -> bytes:
        changed = bytearray(frame)
        changed[len(changed) // 2] ^= 1
        return bytes(changed)

    return _one_frame(insider, flip, "one bit")


def malformed_frames(insider: Insider, _order: Order) -> str:
    return _one_frame(insider, lambda frame: random.Random("noise").randbytes(len(frame)), "noise")


def _one_frame(insider: Insider, change: Callable[[bytes], bytes], what: str) -> str:
    assignment = insider.wait_for_place()
    insider.change_frame = change
    _until(lambda: insider.change_frame is None, "no message of the pipeline was sent")
    return f"{what} in a frame of generation {assignment.generation}"


def nan_in_sum(insider: Insider, _order: Order) -> str:
    assignment = insider.wait_for_place()
    left = 2

    def spoil(numbers: list[float]) -> list[float]:
        nonlocal left
        left -= 1
        if not left:
            insider.change_sum = None
        return [math.nan] * len(numbers)

    insider.change_sum = spoil
    _until(lambda: left < 2, "nothing was summed")
    return f"in generation {assignment.generation}"


def stall(insider: Insider, order: Order) -> str:
    assignment = insider.wait_for_place()
    began: list[float] = []

    def stand_still(numbers: list[float]) -> list[float]:
        insider.change_sum = None
        began.append(time.monotonic())
        time.sleep(order.seconds)
        return numbers

    insider.change_sum = stand_still
    _until(lambda: bool(began), "nothing was summed")
    while time.monotonic() < began[0] + order.seconds:
        status = insider.status()
        if insider.name not in {peer.name for peer in status.peers}:
            break
        if status.generation != assignment.generation:
            raise TimeoutError("something else ended its generation before the deadline")
        time.sleep(_STATUS_SECONDS)
    return f"in generation {assignment.generation}"


def others_files(insider: Insider, order: Order) -> str:
    """Constants in place of the weights of a layer that another peer computes."""
    insider.wait_for_place()
    from safetensors.torch import load_file, save_file

    claimed: list[tuple[int, str]] = []

    def claim(folder: Any, step: int, files: dict[str, Any]) -> dict[str, Any]:
        run = insider.remote_run  # of now: what was another's before may be its own in this generation
        victim = next(name for name in sorted(run._manifest.files) if name not in run._own_files)
        source = Path(insider.process.folder) / "taken" / victim
        with insider.by_hand() as me:
            place = f"{step_folder(run._uploader._committed)}/{victim}"
            found = stat(me.connection, place)
            fetch(me.connection, place, source, nbytes=found.nbytes, sha256=found.sha256)
        forged = {name: t.fill_(0.001) if t.is_floating_point() else t for name, t in load_file(source).items()}
        path = folder.partial(step) / victim
        save_file(forged, path)
        files[victim] = FileEntry(nbytes=path.stat().st_size, sha256=file_sha256(path))
        run._own_files = [victim, *run._own_files]
        claimed.append((step, victim))
        return files

    insider.change_files = claim
    _until(lambda: bool(claimed), "nothing was saved", order.seconds + PLACE_SECONDS)
    (step, victim), *_ = claimed
    return f"{victim} of step {step}"


def old_incarnation(insider: Insider, _order: Order) -> str:
    """Starts its own program again, which then repeats what this one has sent. Does not return."""
    assignment = insider.wait_for_place()
    recording = _Recording(insider.process.incarnation, assignment.generation, list(insider.sent))
    write_atomically(recording_path(), msgspec.msgpack.encode(recording))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def repeat_recorded(insider: Insider) -> str:
    """In the new program, once the hub knows of it; it need not have a place."""
    recording = msgspec.msgpack.decode(recording_path().read_bytes(), type=_Recording)
    recording_path().unlink()
    _until(lambda: insider.process is not None, "no connection", PLACE_SECONDS)
    _until(lambda: insider.name in {peer.name for peer in insider.status().peers}, "it was not let in")
    with insider.by_hand() as me:
        for how, to, kind, data in recording.sent:
            if how == "send":
                me.tell(to, kind, data)
            else:
                me.say(kind, data)
        me.say("heartbeat", Heartbeat(incarnation=recording.incarnation, generation=recording.generation))
        me.say("leave", LeaveRequest(incarnation=recording.incarnation))
    return f"{len(recording.sent)} messages of generation {recording.generation}"


def _until(done: Callable[[], bool], otherwise: str, seconds: float = PLACE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
