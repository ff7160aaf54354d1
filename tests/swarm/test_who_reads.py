"""Who gets the data of a hub's run: batches go to the first segment alone, and the owner can keep both ends."""

import io
import re
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from tests.programs import PATIENCE, events_of, files_of, hub_arguments, invites_of
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_as, ask_next, begin_generation, running_hub
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.hub import HubSettings
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.data import Cursor
from thinpipe.data.manifest import MANIFEST_NAME
from thinpipe.planning.partition import Machine, SegmentNeeds, Traffic, make_partition
from thinpipe.swarm.hub.kept_ends import partition_with_kept_ends
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.who_reads import who_reads
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import Assignment, Standby, TokensRequest
from thinpipe.swarm.protocol.status import Status, render
from thinpipe.training.trainer import Trainer

PLAIN = BoundaryConfig()
AQSGD = BoundaryConfig(states=CompressionConfig(kind="quantise", bits=4, per="token", feedback="aqsgd"))


def ask_for(connection, split, index):
    return connection.request(
        "tokens", msgspec.msgpack.encode(TokensRequest(split=split, index=index)), seconds=PATIENCE
    )


def test_batches_are_for_the_peer_with_the_first_segment_alone(run_config, caplog):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        assert begin_generation(running, first, second)[0].names == ["p0", "p1"]
        source = running.hub.run_host.source
        wanted = {"train": source.batch(Cursor(samples_seen=0)), "validation": source.validation[0]}
        for split, ids_BW in wanted.items():
            assert ask_for(first, split, 0) == ids_BW.astype("<u2").tobytes()
            with pytest.raises(ConnectionError, match="the hub has refused a request of this machine to tokens"):
                ask_for(second, split, 0)
        refused = [record.getMessage() for record in caplog.records if "was refused" in record.message]
        assert refused == 2 * [
            "hub.p1.tokens: a request of p1 was refused: batches are for the peer with the first segment alone"
        ]


def test_no_file_of_tokens_can_be_fetched(run_config):
    """What the file service finds is named by the checkpoint and by the tokenizer, not by the data."""
    with running_hub(run_config) as running:
        data = run_config.data.path
        names = [str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()]
        assert any(name.endswith(MANIFEST_NAME) for name in names)
        for name in (*names, *(f"../{data.name}/{name}" for name in names), *(f"tokenizer/../{n}" for n in names)):
            assert running.hub.run_host.find(name) is None


# Ends


def machine(name, flops):
    return Machine(name=name, flops=flops, memory_nbytes=1 << 40, up_bps=1e9, down_bps=1e9)


NEEDS = [SegmentNeeds(flops_per_token=1e6, memory_nbytes=1 << 20)] * 6


def place(machines, owned, memory_nbytes=1 << 40, **more):
    traffic = Traffic(forward_nbytes=1e-3, backward_nbytes=1e-3)

    def partition(among):
        among = [replace(each, memory_nbytes=memory_nbytes) for each in among]
        return make_partition(NEEDS, among, traffic, hub_up_bps=1e9, hub_down_bps=1e9, **more)

    return partition_with_kept_ends(machines, owned, len(NEEDS), partition).stages


@pytest.mark.parametrize("use_all_peers", [False, True])
def test_the_owners_machines_have_both_ends_whoever_is_faster(use_all_peers):
    four = [machine("stranger", 4e12), machine("home", 1e12), machine("attic", 2e12), machine("friend", 1e11)]
    stages = place(four, ("home", "attic"), use_all_peers=use_all_peers)
    assert {stages[0][0], stages[-1][0]} == {"home", "attic"}
    assert "stranger" in [name for name, _ in stages]
    assert (len(stages) == 4) == use_all_peers
    unlimited = place(four, (), use_all_peers=use_all_peers)
    assert {unlimited[0][0], unlimited[-1][0]} != {"home", "attic"}


def test_without_the_owners_machines_nothing_begins():
    kept = "hub.keep_ends keeps the first and the last segment on home and attic"
    with pytest.raises(UserError, match=f"{kept}, and none of them can compute now: start `thinpipe join` there"):
        place([machine("stranger", 1e12)], ("home", "attic"))
    three = 3 * NEEDS[0].memory_nbytes
    with pytest.raises(UserError, match=f"{kept}, of which attic cannot compute now, so the model does not fit"):
        place([machine("home", 1e12), machine("stranger", 1e12)], ("home", "attic"), memory_nbytes=three)
    whole = place([machine("home", 1e12), machine("stranger", 1e12)], ("home", "attic"))
    assert whole == (("home", range(6)),), "one machine of the owner's can have the whole model"


def test_a_hub_keeps_the_ends_and_waits_after_a_loss(run_config, monkeypatch):
    """Also when patience with too few peers is over."""
    config = replace(run_config, training=replace(run_config.training, global_batch_size=16))
    settings = {"keep_ends": ("p1", "p2"), "patience_seconds": 0.0}
    with running_hub(config, ("p0", "p1", "p2"), **settings) as running:
        host = running.hub.run_host
        large = [SegmentNeeds(flops_per_token=1e6, memory_nbytes=1 << 39) for _ in host.run_model.needs]
        monkeypatch.setattr(host, "run_model", replace(host.run_model, needs=large))
        with (
            running.connection("p0") as slow,
            running.connection("p1") as own,
            running.connection("p2") as fast,
        ):
            works = begin_generation(running, slow, own, fast)
            assert works[0].names == ["p1", "p0", "p2"], "the slowest would be first otherwise"
            status = ask_as(slow, "status", 0, Status)
            assert status.who_reads == host.who_reads
            assert "every machine that computes" in status.who_reads
            shown = io.StringIO()
            Console(file=shown, width=1000).print(render(status))
            assert host.who_reads in shown.getvalue().splitlines()
        wait_until(lambda: not running.hub.membership.present)
        with running.connection("p0", "b") as slow, running.connection("p1", "b") as own:
            answers = [ask_next(slow, running, incarnation="b"), ask_next(own, running, incarnation="b")]
            assert all(isinstance(answer, Standby) for answer in answers), answers
            assert "hub.keep_ends keeps the first and the last segment on p1 and p2" in answers[1].text
            assert "p2 cannot compute now" in answers[1].text
            with running.connection("p2", "b") as fast:
                assert begin_again(running, slow, own, fast).names[1] == "p0"


def begin_again(running, *connections):
    """All have been started again, and ask until a generation begins."""
    while True:
        for connection in connections:
            answer = ask_next(connection, running, incarnation="b")
            if isinstance(answer, Assignment):
                return answer


def test_one_name_is_refused_and_names_must_be_names():
    assert HubSettings(keep_ends=("home", "attic")).keep_ends == ("home", "attic")
    for names in (("home",), ("home", "home")):
        with pytest.raises(UserError, match=r"hub\.keep_ends \[.*\] must be two names or more"):
            HubSettings(keep_ends=names)
    with pytest.raises(UserError, match="'My PC' is not a valid name"):
        HubOptions(run="r", public_url="", peers=2, keep_ends=("home", "My PC"))


# The sentence


def sentence(boundary=PLAIN, boundaries=(1, 2), **more):
    model = HuggingFaceModelConfig(source="", stored={}, vocab_size=300, dim=8, n_layers=4, boundaries=boundaries)
    return who_reads(model, boundary, **{"chats": True} | more)


def test_one_sentence_says_who_can_read_the_data(run_config):
    everybody = "every machine that computes, since each of them receives all token ids"
    keel = who_reads(run_config.model.resolve(64), run_config.boundary, chats=False, keep_ends=("a", "b"))
    assert keel == f"who can read the data: the hub's owner, and {everybody}"
    assert sentence(AQSGD) == keel, "AQ-SGD has the ids in its messages"
    ends, states = "the machines with the first and the last segment", "every other machine receives states"
    assert ends in sentence()
    assert f"{states} and two flags a token, from which much of the text can be recovered" in sentence()
    assert f"{states}, from which much of the text can be recovered" in sentence(chats=False)
    assert "of the machines that compute only a and b, which receive the token ids" in sentence(keep_ends=("a", "b"))
    assert sentence(boundaries=()).endswith("the machine that computes, which receives all token ids")
    for text in (keel, sentence(), sentence(keep_ends=("a", "b"))):
        assert text.count("\n") == text.count(". ") == 0, "one sentence"


def test_programs_keep_the_ends_and_say_who_reads(run_config, programs, tmp_path):
    """A stranger and two programs of the owner's, to the end: equal to the run alone."""
    parallelism = replace(run_config.parallelism, pipeline_parallel_microbatch_size=2)
    alone = replace(run_config, parallelism=parallelism)
    Trainer(alone).train()
    config = replace(alone, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    (tmp_path / "run.toml").write_text(dump_toml(config))
    kept = ("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.keep-ends", "home", "attic")
    hub = programs("hub", *hub_arguments(tmp_path / "run.toml", 3, *kept))
    own, another, stranger = invites_of(hub)
    assert re.search(
        rf"use this invite on your own machine home, and send it to nobody:\n{re.escape(own)}", hub.printed
    )
    assert f"invite 1 of 1 ({Invite.read(stranger).id}), for one person, secret like a password, " in hub.printed
    for system in ("Linux", "macOS", r"Windows \(PowerShell\)"):
        assert re.search(rf"^  {system}: .*git\+https://.* join '{re.escape(stranger)}'", hub.printed, re.MULTILINE)
    joined = [
        programs(f"peer{index}", "join", invite, "--folder", tmp_path / f"peer{index}")
        for index, invite in enumerate((stranger, own, another))
    ]
    for program in (hub, *joined):
        assert program.finish() == 0, program.printed
    sentence = "who can read the data: the hub's owner, and every machine that computes"
    assert sentence in hub.printed
    for program in joined:
        lines = program.printed.splitlines()
        title = next(index for index, line in enumerate(lines) if line.startswith("before it begins"))
        compute, send, keep, see = lines[title + 1 : title + 5]
        for line, what in ((compute, "compute"), (send, "send"), (keep, "keep"), (see, "see")):
            assert line.split()[0] == f"{what}:", program.printed
        assert str(tmp_path / "peer") in keep, "the folder is named"
        assert sentence in see
    begun = events_of(config, GenerationStarted)
    assert begun
    assert all(event.who_reads.startswith(sentence) for event in begun)
    assert all([place.name for place in event.peers][1:-1] == ["p0"] for event in begun)
    assert files_of(config, 12) == files_of(alone, 12)
