"""Commits made by hand: files of the first checkpoint as those of a later step; what matters is how they arrive."""

import shutil
import time

import msgspec

from tests.train.hubs import ask_as
from tests.train.programs import PATIENCE
from thinpipe.checkpoint.folder import MANIFEST, step_folder
from thinpipe.swarm.file_transfer import push
from thinpipe.swarm.messages import SavedRequest, Verdict


def save_by_hand(hosted, step, folder):
    """A checkpoint as a peer has it on its disk."""
    path = folder / step_folder(step)
    shutil.copytree(hosted.checkpoints.folder / step_folder(0), path)
    manifest = msgspec.structs.replace(hosted.newest.manifest, step=step).sealed()
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


def tell_saved(post, path, *, epoch=1):
    files = [file.name for file in path.glob("*.safetensors")]
    request = SavedRequest(epoch=epoch, manifest=(path / MANIFEST).read_bytes(), files=files)
    return ask_as(post, "saved", request, Verdict)


def commit_by_hand(post, hosted, step, folder, *, epoch=1):
    path = save_by_hand(hosted, step, folder)
    assert tell_saved(post, path, epoch=epoch).refusal == ""
    push_all(post, path)
    assert hosted.committed == step
    return path


def push_all(post, path, names=None):
    for file in sorted(path.glob("*.safetensors")):
        if names is None or file.name in names:
            push(post, file, f"{path.name}/{file.name}")


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
