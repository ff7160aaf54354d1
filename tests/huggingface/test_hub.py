"""`thinpipe hub` and `join` on a Hugging Face model: real programs on this machine, with the bits of one process."""

import signal
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from tests.data.chats import write_run_data
from tests.huggingface.model_hub import COMMIT, model_hub
from tests.huggingface.models import save_model, small_config
from tests.huggingface.run_files import STEPS, run_of
from tests.huggingface.test_placements import outcome
from tests.huggingface.test_recomputed_loss import change
from tests.programs import events_of, files_of, hub_arguments, invites_of, steps_of, wait_for_event
from tests.swarm import network_namespaces as homes
from tests.swarm.commits import wait_until
from tests.swarm.hub.test_training_host import host
from tests.swarm.network_namespaces import HomeLink, Homes
from thinpipe.config.toml import dump_toml
from thinpipe.core.audit_events import LayersUnchanged, LossRecomputed
from thinpipe.core.errors import UserError
from thinpipe.core.events import Step
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.models.hf.base_tensors import PeerBase
from thinpipe.swarm.hub.run_settings import settings_for_peers
from thinpipe.training.trainer import Trainer

CUTS = (3, 5)
MANY = 40
"""Steps of a run in which something happens."""
FAST = ("--hub.up", "1gbps", "--hub.down", "1gbps")


class Swarm:
    """A hub and its peers."""

    def __init__(self, programs, config, peers, *arguments, environment=None):
        self.programs, self.folder, self.environment = programs, config.job.dump_folder, environment
        file = self.folder.with_suffix(".toml")
        file.write_text(dump_toml(config))
        self.hub = programs("hub", *hub_arguments(file, peers, *FAST, *arguments), environment=environment)
        self.invites = invites_of(self.hub)
        self.joined = {}

    def join(self, name, *arguments, environment=None):
        where = ("--folder", self.home(name), "--name", name, "--device", "cpu", *arguments)
        self.joined[name] = self.programs(
            name, "join", self.invites.pop(0), *where, environment=environment or self.environment
        )
        return self.joined[name]

    def home(self, name):
        return self.folder.with_name(name)

    def base(self, name):
        """What a peer has of the base."""
        return PeerBase(self.home(name) / "base")

    def received(self, name):
        folder = self.home(name) / "base" / "tensors"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    def finish(self):
        for program in (self.hub, *self.joined.values()):
            said = "\n\n".join(each.printed[-3000:] for each in (self.hub, *self.joined.values()))
            assert program.finish() == 0, said


@pytest.fixture
def base(base_of):
    return base_of("qwen3")


def both(base, tokens, tmp_path, way="LoRA", **sections):
    """The same run in one process, finished, and for a hub."""
    twin, config = (run_of(base, tokens, tmp_path / name, way, cuts=CUTS, **sections) for name in ("twin", "run"))
    Trainer(twin).train()
    return twin, config


@pytest.mark.parametrize(
    "way", ["LoRA", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("full", "nf4", "int8"))]
)
def test_a_hub_and_three_peers_equal_one_process(way, base, tune_tokens, tmp_path, programs):
    """One peer has the base's folder; the others have the tensors of their own layers from the hub, and no others."""
    twin, config = both(base, tune_tokens, tmp_path, way)
    swarm = Swarm(programs, config, 3)
    swarm.join("own", "--base", base)
    swarm.join("first")
    swarm.join("second")
    swarm.finish()
    assert outcome(config) == outcome(twin)
    (started,) = events_of(config, GenerationStarted)
    for peer in started.peers:
        segments = swarm.base(peer.name).statement().of_segments(peer.segments)
        assert swarm.received(peer.name) == (set() if peer.name == "own" else {each.sha256 for each in segments})
    check_commits(config, base, way)


def check_commits(config, base, way):
    """Commits have what is trained; the first one has nothing, and with adapters none has a tensor of the base."""
    frozen = {tensor.numpy().tobytes() for path in base.glob("*.safetensors") for tensor in load_file(path).values()}
    for step in (0, 2, STEPS):
        folder = config.job.dump_folder / "checkpoints" / f"step-{step:08}"
        files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        assert (files.keys() == {"run.safetensors"}) == (step == 0)
        if way != "full" or not step:
            names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
            assert all(".lora_" in name for name in names)
            assert not any(content in data for content in frozen for data in files.values())


@pytest.mark.long
def test_a_peer_that_is_killed_is_replaced_and_no_bit_changes(base, tune_tokens, tmp_path, programs):
    """By one that was a standby and has all of the base by then."""
    longer = run_of(base, tune_tokens, tmp_path / "twin").training
    twin, config = both(base, tune_tokens, tmp_path, training=replace(longer, steps=MANY))
    swarm = Swarm(programs, config, 3, "--hub.invites", 4, "--hub.patience-seconds", 600, "--hub.audit-share", 1.0)
    for name in ("a", "b", "c"):
        swarm.join(name, "--base", base)
    wait_for_event(config, GenerationStarted, generation=1)
    standby = swarm.join("standby")
    stated = PeerBase(config.job.dump_folder / "hub").statement().tensors
    wait_until(lambda: swarm.received("standby") == {tensor.sha256 for tensor in stated})
    wait_until(lambda: len(events_of(config, Step)) > 2)
    killed = swarm.joined.pop("b")
    assert max(step.step for step in steps_of(config)) < MANY - 5, "the run was over too soon"
    killed.process.send_signal(signal.SIGKILL)
    again = wait_for_event(config, GenerationStarted, generation=2)
    assert "standby" in {peer.name for peer in again.peers}
    swarm.finish()
    assert standby.printed.count("downloading") > 0
    assert all(event.reported == event.recomputed for event in events_of(config, LossRecomputed))
    assert events_of(config, LayersUnchanged) == []
    assert files_of(config, MANY) == files_of(twin, MANY)


@pytest.mark.long
def test_a_changed_base_is_refused_by_name(base, tune_tokens, tmp_path, programs):
    tensor = "model.layers.4.mlp.up_proj.weight"
    config = run_of(base, tune_tokens, tmp_path / "run", cuts=CUTS)
    swarm = Swarm(programs, config, 1)
    changed = change(base, tmp_path / "changed", tensor)
    wrong = swarm.join("wrong", "--base", changed)
    assert wrong.finish() == 2
    refusal = f"{tensor} in {changed} is not that of the hub's base"
    assert refusal in wrong.printed.replace("\n", " ")
    swarm.joined["right"] = programs("right", "join", swarm.home("wrong"))
    swarm.joined.pop("wrong")
    swarm.finish()
    assert len(steps_of(config)) == STEPS


def test_a_hub_refuses_a_base_that_has_changed(base, tune_tokens, tmp_path):
    tensor = "model.layers.4.mlp.up_proj.weight"
    own = change(base, tmp_path / "own", tensor)
    config = run_of(own, tune_tokens, tmp_path / "run", cuts=(3,))
    run = host(config)
    begin_of_two(run)
    run.close()
    host(config).close()
    change(own, own, tensor)
    with pytest.raises(UserError, match="has changed since the hub has read it"):
        begin_of_two(run)
    with pytest.raises(UserError, match=f"was trained on another base than {own}"):
        host(config)


def begin_of_two(run):
    from thinpipe.planning.partition import Partition
    from thinpipe.swarm.hub.replica import Generation

    stages = (("a", range(1)), ("b", range(1, 2)))
    partition = Partition(stages=stages, standbys=(), too_small=(), loads=(), tokens_per_second=1.0, bottleneck="")
    return run.begin(Generation(1, partition, {"a": 1, "b": 1}))


def test_peers_download_from_the_model_hub_of_their_own_environment(base, tune_tokens, tmp_path, programs):
    """Each the files with its own layers, at the commit to which the hub has pinned the name; who cannot reach it has
    them from the run's hub."""
    twin = run_of(base, tune_tokens, tmp_path / "twin", cuts=CUTS)
    Trainer(twin).train()
    config = run_of("hf:someone/small", tune_tokens, tmp_path / "run", cuts=CUTS)
    with model_hub("someone/small", base) as (environment, asked):
        swarm = Swarm(programs, config, 2, environment=environment | {"HF_HOME": str(tmp_path / "hf of hub")})
        asked.clear()
        swarm.join("online", environment=environment | {"HF_HOME": str(tmp_path / "hf of online")})
        swarm.join("offline", environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf of offline")})
        swarm.finish()
    assert files_of(config, STEPS) == files_of(twin, STEPS)
    assert f"of hf:someone/small@{COMMIT} from {environment['HF_ENDPOINT']}" in swarm.joined["online"].printed
    assert "the base comes from the run's own hub" in swarm.joined["offline"].printed.replace("\n", " ")
    fetched = {file for method, file in asked if method == "GET"}
    shards = {path.name for path in base.glob("*.safetensors")}
    assert fetched & shards
    assert fetched - shards == {"model.safetensors.index.json"}
    assert shards - fetched, "it has not downloaded other peers' layers"
    assert swarm.received("online") == set() != swarm.received("offline")


@pytest.mark.long
def test_packed_chats_equal_one_process(tmp_path, programs):
    save_model(small_config("llama", vocab_size=64), tmp_path / "base")
    tokens = write_run_data(tmp_path / "tokens", longest=17)
    packed = replace(run_of("", tokens, tmp_path).training, packing=True)
    twin, config = both(tmp_path / "base", tokens, tmp_path, training=packed)
    swarm = Swarm(programs, config, 2)
    for name in ("a", "b"):
        swarm.join(name)
    swarm.finish()
    assert outcome(config) == outcome(twin)


@pytest.mark.long
@pytest.mark.skipif(homes.missing() is not None, reason=str(homes.missing()))
def test_four_homes_tune_to_the_adapter_of_one_process(base, tune_tokens, tmp_path, programs):
    """Behind links of 80 Mbps, two of them with a router; one has the base, one is killed and comes back."""
    longer = replace(run_of(base, tune_tokens, tmp_path).training, steps=MANY)
    twin, config = (
        run_of(base, tune_tokens, tmp_path / name, cuts=(2, 4, 6), training=longer) for name in ("twin", "run")
    )
    Trainer(twin).train()
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    line, router = (HomeLink(up="80mbps", down="80mbps", nat=nat) for nat in (False, True))
    with Homes([line, router, line, router], hub=line) as net:
        arguments = hub_arguments(file, 4, "--hub.patience-seconds", 600)
        arguments = [net.hub.address if each == "127.0.0.1" else each for each in arguments]
        hub = programs("hub", *arguments, place=net.hub)
        peers = []
        for index, (home, invite) in enumerate(zip(net.homes, invites_of(hub), strict=True)):
            name = f"home{index}"
            where = ("--folder", tmp_path / name, "--name", name, *(("--base", base) if index == 0 else ()))
            peers.append(programs(name, "join", invite, *where, place=home))
        wait_until(lambda: len(events_of(config, Step)) > 4)
        peers[2].process.send_signal(signal.SIGKILL)
        peers[2].process.wait()
        peers[2] = programs("home2 again", "join", tmp_path / "home2", place=net.homes[2])
        wait_for_event(config, GenerationStarted, generation=2)
        assert hub.finish() == 0, hub.printed[-3000:]
        assert [peer.finish() for peer in peers] == [0, 0, 0, 0]
    started = events_of(config, GenerationStarted)
    for name in ("home1", "home2", "home3"):
        computed = {index for event in started for peer in event.peers if peer.name == name for index in peer.segments}
        wanted = {tensor.sha256 for tensor in PeerBase(tmp_path / name / "base").statement().of_segments(computed)}
        assert {path.name for path in (tmp_path / name / "base" / "tensors").iterdir()} == wanted, "once, and no others"
    assert files_of(config, MANY) == files_of(twin, MANY)


def test_settings_for_peers_name_no_folder_of_the_hub(base, tune_tokens, tmp_path):
    config = run_of(base, tune_tokens, tmp_path / "run")
    assert settings_for_peers(config).model.hf == "base"
    assert str(tmp_path) not in dump_toml(settings_for_peers(config))
