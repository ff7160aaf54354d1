"""Real hubs and peers to attack: programs, and a server on loopback."""

from dataclasses import replace

import pytest

from tests.programs import hub_arguments, invites_of
from thinpipe.config.run import ParallelismConfig
from thinpipe.config.toml import dump_toml


@pytest.fixture
def run_config(run_config):
    """Three segments; more steps than anyone waits for."""
    return replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
    )


@pytest.fixture
def start_hub(run_config, programs, tmp_path):
    """A hub for so many peers, its program and its invites."""

    def start(peers, *more):
        file = tmp_path / "run.toml"
        file.write_text(dump_toml(run_config))
        fast = ("--hub.up", "1gbps", "--hub.down", "1gbps")  # so that nobody measures it
        hub = programs("hub", *hub_arguments(file, peers, *fast, *more))
        return hub, invites_of(hub)

    return start


@pytest.fixture
def join(programs, tmp_path):
    """`thinpipe join`: an honest peer."""

    def start(invite, name):
        return programs(name, "join", invite, "--folder", tmp_path / name, "--name", name)

    return start


@pytest.fixture
def join_dishonestly(programs, tmp_path):
    """`thinpipe join` of a peer that lies. `lie`: a function of this folder's tests, without arguments, that replaces
    functions of thinpipe (see `dishonest.replace`); `environment`: what it reads to know more."""

    def start(invite, name, lie, **environment):
        return programs(
            name,
            *(f"{lie.__module__}:{lie.__name__}", "join", invite, "--folder", tmp_path / name, "--name", name),
            module="tests.swarm.hostile.dishonest",
            environment=environment,
        )

    return start
