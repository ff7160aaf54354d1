"""Settings of a run that a hub cannot honour are refused before anybody joins."""

from dataclasses import replace
from pathlib import Path

import pytest

from thinpipe.config.boundary import CompressionConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.rounds import RoundsConfig
from thinpipe.config.run import BasisConfig
from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.run_settings import reject_unused_settings


def with_store(config):
    states = CompressionConfig(kind="quantise", bits=4, feedback="aqsgd")
    return {"boundary": replace(config.boundary, states=states, store=Path("store"))}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (lambda _config: {"rounds": RoundsConfig(steps=4), "basis": BasisConfig(interval=0)}, "leave .rounds. out"),
        (
            lambda config: {
                "link": LinkConfig(up="80mbps"),
                "parallelism": replace(config.parallelism, pipeline_parallel_degree=2),
            },
            r"remove \[link\]",
        ),
        (
            lambda config: {"parallelism": replace(config.parallelism, pipeline_parallel_schedule="Interleaved1F1B")},
            "GPipe or 1F1B",
        ),
        (with_store, "boundary.store"),
    ],
)
def test_it_says_what_to_change(run_config, changes, says):
    reject_unused_settings(run_config)
    with pytest.raises(UserError, match=says):
        reject_unused_settings(replace(run_config, **changes(run_config)))
