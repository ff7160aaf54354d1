"""`thinpipe hub` and `join` on a Hugging Face model: real programs on this machine, with the bits of one process."""

import json
from dataclasses import replace

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.huggingface.run_files import STEPS, run_of
from tests.huggingface.test_placements import outcome
from tests.programs import hub_arguments, invites_of
from thinpipe.config.toml import dump_toml
from thinpipe.training.trainer import Trainer

CUTS = (3, 5)
FAST = ("--hub.up", "1gbps", "--hub.down", "1gbps")


class Swarm:
    """A hub and its peers."""

    def __init__(self, programs, config, peers, *arguments):
        self.programs, self.folder = programs, config.job.dump_folder
        file = self.folder.with_suffix(".toml")
        file.write_text(dump_toml(config))
        self.hub = programs("hub", *hub_arguments(file, peers, *FAST, *arguments))
        self.invites = invites_of(self.hub)
        self.joined = {}

    def join(self, name, *arguments):
        where = ("--folder", self.home(name), "--name", name, "--device", "cpu", *arguments)
        self.joined[name] = self.programs(name, "join", self.invites.pop(0), *where)
        return self.joined[name]

    def home(self, name):
        return self.folder.with_name(name)

    def finish(self):
        for program in (self.hub, *self.joined.values()):
            said = "\n\n".join(each.printed[-3000:] for each in (self.hub, *self.joined.values()))
            assert program.finish() == 0, said


@pytest.fixture
def base(base_of):
    return base_of("qwen3")


def both(base, tokens, tmp_path, way, **sections):
    """The same run in one process, finished, and for a hub."""
    twin, config = (run_of(base, tokens, tmp_path / name, way, cuts=CUTS, **sections) for name in ("twin", "run"))
    Trainer(twin).train()
    return twin, config


@pytest.mark.parametrize("way", ["LoRA", "full"])
def test_a_hub_and_three_peers_equal_one_process(way, base, tune_tokens, tmp_path, programs):
    """One peer has the base's folder, the others have their tensors from the hub, and none of others."""
    twin, config = both(base, tune_tokens, tmp_path, way)
    swarm = Swarm(programs, config, 3)
    swarm.join("own", "--base", base)
    swarm.join("first")
    swarm.join("second")
    swarm.finish()
    assert outcome(config) == outcome(twin)
