"""Who made a file of a commit can be shown, and by nobody else be claimed."""

import os
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.swarm.commits import commit_by_hand
from tests.swarm.hubs import ask_next, begin_generation, running_hub
from thinpipe.config.run import JobConfig
from thinpipe.core.foreign import MAX_NBYTES
from thinpipe.swarm.hub.commits.recovery import SignedCommit
from thinpipe.swarm.peer.remote_run import RemoteRun
from thinpipe.swarm.protocol.keys import KeyPair, is_signed_by
from thinpipe.swarm.protocol.signed_files import COMMIT_FILE, Occasion, first_unsigned, sign_file

KEY, OTHER = KeyPair.new(), KeyPair.new()
OCCASION = Occasion(run="r", generation=3, step=120)
SHA256 = "0123456789abcdef" * 4
FILE = sign_file(KEY, OCCASION, "blocks.1.safetensors", 1234, SHA256)


def test_a_signature_is_that_of_its_key():
    signature = KEY.sign(b"data")
    assert is_signed_by(KEY.public_key, b"data", signature)
    assert not is_signed_by(OTHER.public_key, b"data", signature)
    assert not is_signed_by(KEY.public_key, b"Data", signature)
    for damaged in (b"", signature[:-1], bytes(64)):
        assert not is_signed_by(KEY.public_key, b"data", damaged)
    for no_key in ("", "U", "not a key", KEY.public_key[:-8]):
        assert not is_signed_by(no_key, b"data", signature)


@pytest.mark.parametrize(
    "change", [{"name": "first.safetensors"}, {"nbytes": 1235}, {"sha256": SHA256[::-1]}, {"signature": bytes(64)}]
)
def test_a_signature_holds_for_this_file_alone(change):
    assert first_unsigned([FILE], KEY.public_key, OCCASION) == ""
    changed = msgspec.structs.replace(FILE, **change)
    assert first_unsigned([FILE, changed], KEY.public_key, OCCASION) == changed.name


@pytest.mark.parametrize("change", [{"run": "s"}, {"generation": 4}, {"step": 121}])
def test_a_signature_holds_for_this_save_alone(change):
    assert not FILE.is_signed_by(KEY.public_key, msgspec.structs.replace(OCCASION, **change))
    assert not FILE.is_signed_by(OTHER.public_key, OCCASION)


def test_a_peer_that_fetches_a_commit_says_what_its_maker_has_not_signed(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        commit_by_hand(run_host, 4, tmp_path, connection)
        assignment = ask_next(connection, running, left_generation=1)
        assert said_on_fetching(connection, assignment, run_config, tmp_path / "good") == []

        path = run_host.newest.path / COMMIT_FILE
        record = msgspec.json.decode(path.read_bytes(), type=SignedCommit)
        stolen = record.makers | {
            "last.safetensors": msgspec.structs.replace(record.makers["last.safetensors"], public_key=OTHER.public_key)
        }
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, makers=stolen)))
        (said,) = said_on_fetching(connection, assignment, run_config, tmp_path / "bad")
        assert said.startswith("step 4: who made last.safetensors (p0) cannot be shown")

        path.write_bytes(b"\xff")
        assert said_on_fetching(connection, assignment, run_config, tmp_path / "damaged") == []
        os.truncate(path, MAX_NBYTES + 1)
        assert said_on_fetching(connection, assignment, run_config, tmp_path / "huge") == []
        assert not [*(tmp_path / "huge").rglob(COMMIT_FILE)]
        path.unlink()
        assert said_on_fetching(connection, assignment, run_config, tmp_path / "older") == []


def said_on_fetching(connection, assignment, run_config, folder):
    """By a peer that fetches all files of the checkpoint, apart from what it downloads."""
    said = []
    config = replace(run_config, job=JobConfig(dump_folder=folder))
    layers = [name.removesuffix(".safetensors") for name in msgspec.json.decode(assignment.manifest)["files"]]
    with closing(RemoteRun(connection, assignment, config, said.append)) as remote_run:
        remote_run.fetch(layers, ())
    return [line for line in said if not line.startswith("downloading")]
