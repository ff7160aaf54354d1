"""What a peer does when its own disk, or that of another peer, fails at the start of a generation."""

import errno
import io
import os
from contextlib import contextmanager

import pytest
from rich.console import Console

from tests.swarm.hubs import begin_generation, identity_of, running_hub
from thinpipe.config.hub import JoinConfig
from thinpipe.core.disk_space import DiskFullError
from thinpipe.core.errors import UserError
from thinpipe.swarm.peer.join import PeerProcess
from thinpipe.transport.collectives import LocalCollectives


@contextmanager
def assigned_peer(run_config, folder):
    """The only peer of a real hub, its connection, and its part of the first generation."""
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        (assignment,) = begin_generation(running, connection)
        address = connection.address
        identity = identity_of(address)
        console = Console(file=io.StringIO(), width=500)
        yield PeerProcess(identity, folder, JoinConfig(invite=""), console), connection, assignment


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, DiskFullError), (errno.EIO, UserError)])
def test_a_full_disk_is_waited_for_and_a_broken_one_is_not(run_config, tmp_path, monkeypatch, number, raised):
    open_file = os.open

    def failing_open(path, *arguments, **options):
        if ".leader-" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, *arguments, **options)

    with assigned_peer(run_config, tmp_path / "peer") as (peer, connection, assignment):
        monkeypatch.setattr(os, "open", failing_open)
        with pytest.raises(raised) as caught:
            peer._run_generation(connection, assignment)
        monkeypatch.undo()
    assert isinstance(caught.value, UserError) == (raised is UserError)
    assert caught.value.__cause__ is not None


PROBLEM = b"[Errno 5] Input/output error"


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(b"", PROBLEM), (b'{"step":', b'{"step": -1, "error": "%s"}' % PROBLEM)],
    ids=["leader election", "common checkpoint"],
)
def test_a_broken_disk_of_another_peer_ends_only_the_generation(run_config, tmp_path, monkeypatch, mine, theirs):
    """The other peer is one more answer in what this peer gathers."""

    def all_gather_bytes(_self, data):
        is_exchange = data.startswith(mine) if mine else not data
        return [data, theirs] if is_exchange else [data]

    monkeypatch.setattr(LocalCollectives, "all_gather_bytes", all_gather_bytes)
    with assigned_peer(run_config, tmp_path / "peer") as (peer, connection, assignment):
        assert peer._run_generation(connection, assignment) is False, "the user has not asked to leave"
    assert peer.error.endswith(PROBLEM.decode())
