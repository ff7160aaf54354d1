"""Friends at home: a hub and four PCs on links of 80 Mbps, two of them behind routers that let nobody in."""

import shutil
from dataclasses import replace

import pytest

from tests.programs import files_of, invites_of, steps_of
from tests.swarm import network_namespaces as homes
from tests.swarm.network_namespaces import HomeLink, Homes, capture, frames
from thinpipe.checkpoint import find_checkpoint
from thinpipe.config.run import JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.data import Cursor
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.trainer import Trainer

_MISSING = homes.missing()
pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
    pytest.mark.skipif(not (shutil.which("tshark") and shutil.which("tcpdump")), reason="needs tshark and tcpdump"),
]
AT_HOME, BEHIND_A_ROUTER = HomeLink(up="80mbps", down="80mbps"), HomeLink(up="80mbps", down="80mbps", nat=True)


@pytest.fixture
def four_segments(run_config):
    return replace(
        run_config,
        model=replace(run_config.model, boundaries=(1, 2, 3)),
        parallelism=replace(run_config.parallelism, pipeline_parallel_microbatch_size=1),
    )


def test_four_homes_train_to_the_weights_of_one_process_and_nobody_on_the_way_can_read_it(
    four_segments, programs, tmp_path
):
    Trainer(four_segments).train()
    config = replace(four_segments, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    links = [AT_HOME, BEHIND_A_ROUTER, AT_HOME, BEHIND_A_ROUTER]
    path = tmp_path / "line.pcap"
    with Homes(links, hub=AT_HOME) as net, capture(net.hub, path):
        hub = programs(
            *("hub", "hub", file, "--hub.peers", 4, "--hub.use-all-peers", "--hub.address", net.hub.address),
            *("--hub.heartbeat-timeout-seconds", 120, "--hub.stall-floor-seconds", 120),
            place=net.hub,
        )
        peers = [
            programs(f"home{index}", "join", invite, "--folder", tmp_path / f"home{index}", place=home)
            for index, (home, invite) in enumerate(zip(net.homes, invites_of(hub), strict=True))
        ]
        assert hub.finish() == 0, hub.printed
        assert [peer.finish() for peer in peers] == [0, 0, 0, 0]
    assert files_of(config, 12) == files_of(four_segments, 12)
    assert [step.loss for step in steps_of(config)] == [step.loss for step in steps_of(four_segments)]

    first_ids = LocalTokens(config).batch(Cursor()).astype("<u2").tobytes()[:12]
    weights = find_checkpoint(four_segments.job.dump_folder).layer("blocks.1")
    some_weights = weights["blocks.1.mlp.up_proj.weight"].numpy().tobytes()[:12]
    for secret in (first_ids, some_weights):
        assert frames(path, f"frame contains {secret.hex(':')}") == 0
    assert frames(path, "tls.app_data", "-d", f"tcp.port=={hub.until(r'tls://[0-9.]+:([0-9]+)')[1]},tls") > 1000
