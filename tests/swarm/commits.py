"""Commits made by hand: files of the first checkpoint as those of a later step; what matters is how they arrive."""

import shutil
import time

import msgspec

from tests.programs import PATIENCE
from tests.swarm.hubs import ask_as
from thinpipe.checkpoint import Manifest
from thinpipe.core.run_folder import MANIFEST, step_folder
from thinpipe.swarm.peer.file_transfer import push
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import AnnouncementReply, CheckpointAnnouncement
from thinpipe.swarm.protocol.signed_files import Occasion, sign_file


def samples_at(run_host, step):
    newest = run_host.newest.manifest
    return newest.samples_seen + (step - newest.step) * run_host.config.training.global_batch_size


def save_by_hand(run_host, step, folder):
    """A checkpoint as a peer has it on its disk."""
    path = folder / step_folder(step)
    shutil.copytree(run_host.checkpoints.folder / step_folder(0), path)
    changes = {"step": step, "samples_seen": samples_at(run_host, step)}
    manifest = msgspec.structs.replace(run_host.newest.manifest, **changes).with_checksum()
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


def announcement(address, manifest, files, *, generation=1, key=None):
    """As a peer signs it, or with another `key`. `files`: names."""
    occasion = Occasion(run=address.fingerprint, generation=generation, step=manifest.step)
    key = key or KeyPair.from_seed(address.credentials.seed)
    entries = [(name, manifest.files[name]) for name in files]
    return CheckpointAnnouncement(
        generation=generation,
        step=manifest.step,
        samples_seen=manifest.samples_seen,
        basis_version=manifest.basis_version,
        basis_sha256=manifest.basis_sha256,
        files=[sign_file(key, occasion, name, entry.nbytes, entry.sha256) for name, entry in entries],
    )


def files_of_peer(run_host, name):
    """Checkpoint files of the layers that this peer of the generation holds."""
    return sorted(run_host.ledger._held[name])


def tell_saved(connection, run_host, path, *, generation=1):
    manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    files = files_of_peer(run_host, connection.address.name)
    request = announcement(connection.address, manifest, files, generation=generation)
    return ask_as(connection, "checkpoint", request, AnnouncementReply)


def commit_by_hand(run_host, step, folder, *connections, generation=1):
    """All peers of a generation announce the step; then each uploads what the hub wants of it."""
    path = save_by_hand(run_host, step, folder)
    for connection in connections:
        assert tell_saved(connection, run_host, path, generation=generation).refusal == ""
    for connection in connections:
        push_all(connection, path, tell_saved(connection, run_host, path, generation=generation).wanted)
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
