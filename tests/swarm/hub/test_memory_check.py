"""A run that cannot fit: `hub` and `up` refuse it before torch is imported, a peer before it makes its segments."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from tests.swarm.peer.test_join import assigned_peer
from tests.train.test_memory_check import huge
from thinpipe.config.hub import HubConfig, UpConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.swarm.hub import memory_check
from thinpipe.training import memory_check as local_check


def as_kind(config, kind, **own):
    return kind(**{field.name: getattr(config, field.name) for field in fields(RunConfig)}, **own)


@pytest.mark.parametrize("verb", ["hub", "up"])
def test_a_run_that_cannot_fit_is_refused_without_torch(run_config, tmp_path, verb):
    (tmp_path / "run.toml").write_text(dump_toml(huge(run_config)))
    code = (
        "import sys; from thinpipe.cli import main; "
        f"code = main([{verb!r}, {str(tmp_path / 'run.toml')!r}]); sys.exit(3 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "the hub makes the first weights, one segment after the other, and segment" in done.stderr
    assert "cut the model into more segments (model.boundaries)" in done.stderr
    assert not run_config.job.dump_folder.exists()


def test_the_peers_of_up_are_counted_together(run_config, monkeypatch):
    up = as_kind(replace(run_config, training=replace(run_config.training, device="cpu")), UpConfig, peers=2)
    monkeypatch.setattr(local_check, "free_host_nbytes", lambda: 1_000_000_000)
    with pytest.raises(UserError, match=r"memory for 2 processes on the CPU .* Python and torch 1.2 GB"):
        memory_check.check_up(up)
    monkeypatch.setattr(local_check, "free_host_nbytes", lambda: 3_000_000_000)
    memory_check.check_up(up)


def test_a_hub_needs_room_for_one_segment_and_can_be_told_to_try(run_config, monkeypatch):
    hub = as_kind(run_config, HubConfig)
    monkeypatch.setattr(local_check, "free_host_nbytes", lambda: 1000)
    with pytest.raises(UserError, match="the hub makes the first weights"):
        memory_check.check_hub(hub)
    memory_check.check_hub(replace(hub, training=replace(hub.training, check_memory=False)))
    monkeypatch.setattr(local_check, "free_host_nbytes", lambda: 500_000_000)
    memory_check.check_hub(hub)


def test_a_peer_refuses_segments_that_do_not_fit_any_more(run_config, tmp_path, monkeypatch):
    with assigned_peer(run_config, tmp_path / "peer") as (peer, connection, assignment):
        monkeypatch.setattr(local_check, "free_host_nbytes", lambda: 1000)
        with pytest.raises(UserError, match=r"the run needs .*assigned to this machine.*`thinpipe join .*peer`"):
            peer._run_generation(connection, assignment)
        assert not list((tmp_path / "peer" / "checkpoints").glob("*/*.safetensors"))
