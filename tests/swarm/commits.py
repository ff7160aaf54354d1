"""Commits made by hand: files of the first checkpoint as those of a later step; what matters is how they arrive."""

import shutil
import time

import msgspec

from tests.programs import PATIENCE
from tests.swarm.hubs import ask_as
from thinpipe.core.run_folder import MANIFEST, step_folder
from thinpipe.swarm.peer.file_transfer import push
from thinpipe.swarm.protocol.messages import AnnouncementReply, CheckpointAnnouncement


def save_by_hand(run_host, step, folder):
    """A checkpoint as a peer has it on its disk."""
    path = folder / step_folder(step)
    shutil.copytree(run_host.checkpoints.folder / step_folder(0), path)
    manifest = msgspec.structs.replace(run_host.newest.manifest, step=step).with_checksum()
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


def tell_saved(connection, path, *, generation=1):
    files = [file.name for file in path.glob("*.safetensors")]
    request = CheckpointAnnouncement(generation=generation, manifest=(path / MANIFEST).read_bytes(), files=files)
    return ask_as(connection, "checkpoint", request, AnnouncementReply)


def commit_by_hand(connection, run_host, step, folder, *, generation=1):
    path = save_by_hand(run_host, step, folder)
    assert tell_saved(connection, path, generation=generation).refusal == ""
    push_all(connection, path)
    assert run_host.committed == step
    return path


def push_all(connection, path, names=None):
    for file in sorted(path.glob("*.safetensors")):
        if names is None or file.name in names:
            push(connection, file, f"{path.name}/{file.name}")


def wait_until(true, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def flip_a_byte(path):
    """In the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])
