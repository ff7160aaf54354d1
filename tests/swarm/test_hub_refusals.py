"""What is refused and who has to wait: as people would see it, in real processes."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec

import thinpipe
from tests.programs import events_of, files_of, hub_arguments, invites_of, run_to_end
from tests.swarm.commits import wait_until
from tests.swarm.hub.test_training_host import flipped_bit, hashes_at_a_peer
from tests.swarm.hubs import ask_as, begin_generation, running_hub
from tests.swarm.test_checkpoint_copies import fill, small_disk
from thinpipe.config.run import JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.hub_events import GenerationEnded
from thinpipe.core.numerics import NUMERICS_VERSION, numerics, numerics_mismatch
from thinpipe.models.model import make_space
from thinpipe.planning.segment_costs import segment_costs, segment_needs, shared_nbytes
from thinpipe.subspace.basis import Basis
from thinpipe.swarm.protocol.messages import ReadyReply, ReadyRequest
from thinpipe.training.trainer import Trainer
from thinpipe.transport.nats.broadcasts import GenerationOver


def host_elsewhere(config, tmp_path, **training):
    """The run alone, and the same for a hub with its file."""
    config = replace(config, training=replace(config.training, **training))
    run_host = replace(config, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    (tmp_path / "run.toml").write_text(dump_toml(run_host))
    return config, run_host


def changed_copy(folder, old, new):
    """A thinpipe in this folder that differs from ours in one line of core/numerics.py."""
    shutil.copytree(Path(thinpipe.__file__).parent, folder / "thinpipe", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "thinpipe" / "core" / "numerics.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    return folder


def test_other_numerics_a_second_hub_and_too_little_memory(run_config, programs, tmp_path):
    alone, run_host = host_elsewhere(run_config, tmp_path)
    Trainer(alone).train()
    hub = programs("hub", *hub_arguments(tmp_path / "run.toml", 1))
    (invite,) = invites_of(hub)

    line = f"NUMERICS_VERSION = {NUMERICS_VERSION}\n"
    other = changed_copy(tmp_path / "other", line, f"NUMERICS_VERSION = {NUMERICS_VERSION + 1}\n")
    code, printed = run_to_end("join", invite, "--folder", tmp_path / "anna", path=other)
    refusal = numerics_mismatch(msgspec.structs.replace(numerics(), version=NUMERICS_VERSION + 1), numerics())
    everybody = "every machine that computes, since each of them receives all token ids"
    told = f"who can read the data: the hub's owner, and {everybody}"
    assert told in " ".join(hub.printed.split())
    assert (code, " ".join(printed.split()).endswith(f"{told} thinpipe: the hub refused: {refusal}")) == (2, True)

    code, printed = run_to_end(*hub_arguments(tmp_path / "run.toml", 1))
    assert (code, "is in use by another hub" in printed) == (2, True), printed

    model = alone.model.resolve(64)
    limit = (
        sum(need.memory_nbytes for need in segment_needs(segment_costs(model, alone), alone))
        + shared_nbytes(model, alone)
        - 1
    )
    anna = programs("anna", "join", invite, "--folder", tmp_path / "anna", "--name", "anna", "--memory", f"{limit}B")
    anna.until(r"the model needs .*, and 1 machine\(s\) have .*: another machine with .* would help")
    code, second = run_to_end("invite", run_host.job.dump_folder)
    assert code == 0, second
    # Code that computes the same numbers takes part, whatever it looks like.
    same = changed_copy(tmp_path / "same", line, f"{line}# a comment\n")
    found = {"PYTHONPATH": os.pathsep.join((str(same), os.getcwd()))}
    bert = programs(
        "bert", "join", second.splitlines()[1], "--folder", tmp_path / "bert", "--name", "bert", environment=found
    )
    assert hub.finish() == 0, hub.printed
    assert (anna.finish(), bert.finish()) == (0, 0)
    assert files_of(run_host, 12) == files_of(alone, 12)

    # the hub is gone now: who comes back tries for as long as it was told to
    code, printed = run_to_end("join", tmp_path / "anna", "--reconnect-timeout-seconds", 1)
    assert code == 1, printed
    assert "giving up, because the hub has not answered for" in printed


def test_a_peer_with_another_basis_is_refused_before_it_computes(run_config):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        work = begin_generation(running, first, second)[0]
        run_host = running.hub.run_host
        good = hashes_at_a_peer(run_host, work)
        bad = good | {"basis": Basis(flipped_bit(make_space(run_host.model).basis.matrix_DK)).hash}
        assert ask_as(first, "ready", ReadyRequest(generation=1, hashes=good), ReadyReply) == ReadyReply()
        over = []
        cancel = first.subscribe_broadcast("generation_over", over.append)
        refusal = run_host.compare_hashes(bad)
        assert bad["basis"] in refusal
        reply = ask_as(second, "ready", ReadyRequest(generation=1, hashes=bad), ReadyReply)
        assert reply == ReadyReply(refusal=refusal)
        assert list(running.hub.membership.present) == ["p0"]
        assert running.hub.membership.replicas[0].current is None
        assert ask_as(first, "ready", ReadyRequest(generation=1, hashes=good), ReadyReply) == ReadyReply(
            generation_over=True
        )
        wait_until(lambda: over)
        (ended,) = events_of(run_config, GenerationEnded)
        assert (ended.generation, ended.cause, ended.peer) == (1, "refused", "p1")
        assert over == [msgspec.msgpack.encode(GenerationOver(generation=1, reason=ended.reason))]
        assert refusal in ended.reason
        cancel()


def test_a_hub_on_a_full_disk_waits_for_room(run_config, programs, tmp_path):
    _, run_host = host_elsewhere(run_config, tmp_path)
    with small_disk(run_host.job.dump_folder, 64 << 20) as ballast:
        fill(ballast)
        hub = programs("hub", *hub_arguments(tmp_path / "run.toml", 1))
        hub.until("is full .* free at least .* the hub waits until then")
        assert hub.process.poll() is None
        ballast.unlink()
        assert len(invites_of(hub)) == 1
        hub.stop()
