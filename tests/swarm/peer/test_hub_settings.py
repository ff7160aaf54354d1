"""What a peer takes from the settings of its hub: what decides the numbers; nothing that opens a port, logs elsewhere,
costs money or names a place on its disk."""

import dataclasses
import typing
from pathlib import Path

import pytest
import tomli_w

from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError
from thinpipe.swarm.hub.run_settings import settings_for_peers
from thinpipe.swarm.peer.hub_settings import TAKEN, settings_from_hub

MINE = Path("joined/mine")
OF_THE_PEER = {
    "job.dump_folder": "/tmp/elsewhere",
    "job.print_config": True,
    "model.initial": "/etc",
    "model.hf": "/etc",
    "data.path": "/etc",
    "data.mixture": [{"path": "/etc", "weight": 1.0}],
    "training.device": "cuda:7",
    "boundary.store": "/etc",
    "rounds.steps": 1,
    "rounds.replicas": 1000,
    "rounds.format": "fp32",
    "rounds.error_feedback": True,
    "rounds.update_format": "fp32",
    "rounds.lr": 9.0,
    "rounds.momentum": 0.99,
    "rounds.momentum_warmup": 5,
    "link.up": "1kbps",
    "link.down": "1kbps",
    "link.latency": "100s",
    "link.jitter": "100s",
    "metrics.live": True,
    "metrics.dashboard": 8080,
    "metrics.prometheus": 9090,
    "metrics.tensorboard": True,
    "metrics.wandb": "a-project-of-the-hub",
}
"""Settings that a peer does not take, with a value that a hostile hub would send."""


def settings(config_type=RunConfig, place=""):
    """All settings of a run by dotted name, sections of sections as one."""
    for field in dataclasses.fields(config_type):
        kind = typing.get_type_hints(config_type)[field.name]
        kind = next((each for each in typing.get_args(kind) if dataclasses.is_dataclass(each)), kind)
        if not place and dataclasses.is_dataclass(kind):
            yield from settings(kind, f"{field.name}.")
        else:
            yield f"{place}{field.name}", kind


def taken(text):
    return settings_from_hub(text, MINE, "cpu")


def value_of(config, name):
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting, None)


def test_every_setting_is_taken_or_the_peers_own():
    of_the_hub = {f"{section}.{name}" for section, names in TAKEN.items() for name in names}
    assert of_the_hub | OF_THE_PEER.keys() == {name for name, _ in settings()}, "decide who has a new setting"
    assert not of_the_hub & OF_THE_PEER.keys()


@pytest.mark.parametrize("name", OF_THE_PEER)
def test_a_setting_of_the_peer_is_not_taken_from_the_hub(name):
    section, _, setting = name.partition(".")
    ours = taken("")
    theirs = taken(tomli_w.dumps({section: {setting: OF_THE_PEER[name]}}))
    if name == "model.initial":
        assert theirs.model.initial == MINE, "that the run began from a checkpoint; not where it lies"
    elif name == "model.hf":
        assert theirs.model.hf == str(MINE / "base"), "that the run has a base; not where it lies"
    else:
        assert theirs == ours
        assert value_of(theirs, name) != OF_THE_PEER[name]


@pytest.mark.parametrize("name", [name for name, kind in settings() if "Path" in str(kind)])
def test_no_path_is_taken_from_the_hub(name):
    assert name in OF_THE_PEER


def test_what_is_computed_is_as_the_hub_says(run_config):
    at_hub = settings_for_peers(run_config, (2, 1), 7)
    here = taken(dump_toml(at_hub))
    for section, names in TAKEN.items():
        for name in names:
            assert value_of(here, f"{section}.{name}") == value_of(at_hub, f"{section}.{name}")
    assert here.job.dump_folder == MINE
    assert here.training.device == "cpu"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 300_000, "[", "a = " + "[" * 20_000, "training.steps = " + "9" * 5000,
        "training.steps = 10000000000000000000",
        'training.precision = "a\\u001b[2J"', "training.steps = 1e400", 'model.preset = "' + "x" * 2000 + '"',
        "training.steps = -1", "optimizer.lr = nan", "training.steps = 2024-01-01",
    ],
    ids=range(11),
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_in_plain_words(text):
    with pytest.raises((ProtocolError, UserError)) as refused:
        taken(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("text", ["[training]\nof_a_newer_hub = 1", "[of_a_newer_hub]\nx = 1"])
def test_a_setting_that_nobody_knows_is_refused(text):
    with pytest.raises(UserError, match=r"the hub's settings: unknown key .*of_a_newer_hub"):
        taken(text)


def test_a_section_that_is_none_is_as_if_it_were_absent():
    assert taken("metrics = 3\nlink = [1]\n") == taken("")
