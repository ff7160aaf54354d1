"""A peer that belongs, and sends the hub whatever it likes: the hub answers the others as before."""

import asyncio
import math
import random
from dataclasses import replace

import msgspec
import pytest

import thinpipe
from tests.programs import PATIENCE
from tests.swarm.brokers import dialled
from tests.swarm.commits import announcement, files_of_peer, samples_at, save_by_hand, tell_saved, wait_until
from tests.swarm.hubs import ask_as, ask_next, begin_generation, next_request, report, running_hub
from thinpipe.checkpoint.storage import Manifest, received_manifest
from thinpipe.core.events import Saved, Skipped
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.core.numerics import NUMERICS_VERSION
from thinpipe.swarm.hub.services.budgets import BUDGETS
from thinpipe.swarm.protocol.file_messages import BeginWrite, ReadChunk, ReadReply, StatFile, WriteChunk, WriteReply
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.swarm.protocol.messages import (
    AdminRequest,
    AnnouncementReply,
    Answer,
    Assignment,
    EventReport,
    JoinAnswer,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ReachReply,
    ReachRequest,
    ReadyReply,
    ReadyRequest,
    Refused,
    RenewReply,
    Standby,
    TokensRequest,
)
from thinpipe.swarm.protocol.probe import Probe
from thinpipe.swarm.protocol.reduction import ReduceReply, ReduceRequest
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.connection import Address
from thinpipe.transport.nats.service_error import error_code
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest

TRIES = 2000
NASTY = [
    b"",
    b"\x91" * 100_000,
    b"[" * 100_000,
    b'{"event":"saved","path":"' + b"\xff" * 9 + b'"}',
    b"\x81\xa4life\xa4\xff\xff\xff\xff",
    b"\x81\xa4what\xa3\xff\xfe\xfd",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    bytes(1 << 20),
]


UNLIMITED = {
    name: replace(
        budget,
        per_second=1e6,
        refused_per_second=1e6,
        nbytes_per_second=1e12,
        max_nbytes=4 << 20,
        max_unanswered=10_000,
        max_at_once=1000,
        max_pending_nbytes=1 << 40,
    )
    for name, budget in BUDGETS.items()
}
"""For a member that asks as fast as it can: what floods do is shown elsewhere."""


def packed(*fields):
    return [msgspec.msgpack.encode(each) for each in fields]


def seeds_for(running):
    """Requests that make sense, and some that nearly do, by service."""
    newest = running.hub.run_host.newest
    address = Address(
        url="", fingerprint=running.hub.broker.fingerprint, name="p0", credentials=running.credentials["p0"]
    )
    later = msgspec.structs.replace(newest.manifest, step=3, samples_seen=samples_at(running.hub.run_host, 3))
    own = files_of_peer(running.hub.run_host, "p0")
    good = announcement(address, later, own)
    announced = [
        good,
        announcement(address, later, later.files),
        announcement(address, later, own, key=KeyPair.new()),
        announcement(address, msgspec.structs.replace(later, step=10**12), own),
        msgspec.structs.replace(good, files=[*good.files, good.files[0]]),
        msgspec.structs.replace(good, basis_version=None, samples_seen=7),
    ]
    name = f"{newest.path.name}/{next(iter(newest.manifest.files))}"
    nan, inf = math.nan, math.inf
    asked = msgspec.to_builtins(msgspec.msgpack.decode(next_request(running)))
    return {
        "heartbeat": packed(
            Heartbeat(), Heartbeat(generation=1, n_actions=3, idle_s=1.5, waits_for="p1", steps=2, in_step=True)
        ),
        "event": [
            msgspec.json.encode(Saved(step=1, path="a", nbytes=1, seconds=1.0)),
            *packed(
                EventReport(generation=1, event=msgspec.json.encode(Saved(step=1, path="a", nbytes=1, seconds=1.0))),
                EventReport(generation=1, event=msgspec.json.encode(Skipped(step=1, loss=None, culprit="\x1b[2J"))),
                EventReport(generation=1, event=NASTY[3]),
                {"generation": -1, "event": b""},
            ),
        ],
        "status": packed(0),
        "renew": packed(0),
        "reach": packed(
            ReachRequest(address="hub:1"),
            ReachRequest(address="127.0.0.1:1", outcome="unreachable", error="\x1b[2J"),
            {"address": "\x1b[2J", "outcome": "reached"},
            {"address": "a:1", "outcome": "conquered"},
        ),
        "admin": packed(AdminRequest(what="kick", name="p1"), AdminRequest(what="stop"), {"what": "status"}),
        "store": packed(
            StoreRequest(what="set", keys=["a"], value=b"x"),
            StoreRequest(what="set", keys=["a" * 100_000], value=b"x"),
            {"what": "set", "keys": ["a", "b"]},
            {"what": "get", "keys": []},
            StoreRequest(what="add", keys=["a"], amount=1 << 40),
            {"what": "swap"},
            StoreRequest(what="wait", keys=["a"]),
            {"what": "get", "keys": ["none"], "wait_seconds": nan},
            {"what": "get", "keys": ["none"], "wait_seconds": -inf},
            {"what": "add", "keys": ["a"], "amount": 1 << 63},
        ),
        "reduce": packed(
            ReduceRequest(generation=1, round_number=1, op="sum", values=b"\0" * 16),
            ReduceRequest(generation=1, round_number=1, op="equal", values=b"\xff" * 8),
            ReduceRequest(generation=1, round_number=1 << 62, op="sum", values=b""),
            ReduceRequest(generation=-1, round_number=1, op="sum", values=b"\0" * 8),
            {"generation": 1, "round_number": 1, "op": "sum", "values": b"\0" * 7},
            ReduceRequest(generation=1, round_number=1, op="sum", values=b"\0" * (8 << 17)),
            {"generation": 1, "round_number": 1, "op": "mean", "values": b""},
        ),
        "read_file": packed(
            StatFile(name=name),
            ReadChunk(name=name, offset=0, nbytes=9),
            ReadChunk(name=name, offset=1 << 50, nbytes=1),
        ),
        "write_file": packed(BeginWrite(name=name, nbytes=7), WriteChunk(name=name, offset=0, data=b"abc")),
        "probe": packed(Probe(answer_nbytes=1), {"answer_nbytes": -1}, {"answer_nbytes": 1 << 30}),
        "tokens": packed(
            TokensRequest(split="train", index=0),
            TokensRequest(split="train", index=1 << 62),
            TokensRequest(split="validation", index=1 << 62),
            {"split": "train", "index": -1},
            {"split": "train", "index": (1 << 64) - 1},
        ),
        "checkpoint": packed(*announced, {"generation": 1, "manifest": b"{}", "files": [name]}),
        "ready": packed({"generation": 1, "hashes": {}, "more": 1}, ReadyRequest(generation=1, hashes={"basis": "0"})),
        "next": [
            next_request(running, incarnation="b"),
            *packed(
                *(asked | {"concurrent_bps": rates} for rates in ((nan, 1.0), (0.0, 1.0), (-1.0, 1.0), (inf, inf))),
                asked | {"left_generation": (1 << 64) - 1},
                asked | {"why": "\x1b[2J" * 1000},
                asked | {"code": "another"},
                asked | {"incarnation": ["x"]},
            ),
        ],
        "leave": packed(0, LeaveRequest(incarnation="a"), LeaveRequest(incarnation="another")),
    }


EXPECTED = {
    "status": Status,
    "store": StoreReply,
    "reduce": ReduceReply,
    "read_file": ReadReply,
    "write_file": WriteReply,
    "checkpoint": AnnouncementReply,
    "ready": ReadyReply,
    "next": Answer,
    "leave": LeaveReply,
    "renew": RenewReply,
    "reach": ReachReply,
}
"""What may come back; of the line and of tokens come bytes, of the others nothing."""


def damaged(dice, seeds):
    """TRIES of them: as they are, changed in places, cut, put together, or just noise."""
    yield from (*NASTY, *seeds)
    for _ in range(TRIES - len(NASTY) - len(seeds)):
        data = bytearray(dice.choice(seeds))
        match dice.randrange(4):
            case 0:
                data = bytearray(dice.randbytes(dice.randrange(60)))
            case 1:
                data = data[: dice.randrange(len(data) + 1)] + dice.choice(seeds)
            case _:
                for _ in range(dice.randrange(1, 4)):
                    if data:
                        data[dice.randrange(len(data))] = dice.randrange(256)
        yield bytes(data)


def test_no_request_of_a_member_keeps_the_hub_from_answering_others(run_config):
    with running_hub(run_config, budgets=UNLIMITED) as running:

        async def attack(services):
            broker = running.hub.broker
            answers = {service: [] for service in services}
            async with dialled(broker, "p0", running.credentials["p0"]) as (client, faults):
                for service, seeds in services.items():

                    async def came(message, service=service):
                        if error_code(message.headers) is None:  # else the hub cannot read the request
                            answers[service].append(message.data)

                    await client.subscribe(f"_INBOX.p0.{service}", cb=came)
                    dice = random.Random(service)
                    for data in damaged(dice, seeds):
                        await client.publish(f"hub.p0.{service}", data, reply=f"_INBOX.p0.{service}")
                    await client.flush(timeout=PATIENCE)
                    reply = await asyncio.to_thread(honest.request, "status", b"", seconds=PATIENCE)
                    assert msgspec.msgpack.decode(reply, type=Status).peers
                assert not faults
            return answers

        with running.connection("p0") as hostile, running.connection("p1") as honest:
            works = begin_generation(running, hostile, honest)
            assert works[0].names == ["p0", "p1"], "the hostile one is the first, whose events are believed"
            seeds = seeds_for(running)
            assert seeds.keys() == running.hub.services.names, "every service is attacked"
            answers = asyncio.run(attack(seeds))
            for service, given in answers.items():
                for data in given:
                    if service in EXPECTED:
                        msgspec.msgpack.decode(data, type=EXPECTED[service])
                    else:
                        assert service in ("probe", "tokens")
            assert not [service for service in EXPECTED if not answers[service]], "each answers what makes sense"
            assert not answers["admin"], "that is for the owner"

            assert isinstance(
                ask_as(honest, "store", StoreRequest(what="set", keys=["k"], value=b"v"), StoreReply), StoreReply
            )
            assert honest.request("probe", msgspec.msgpack.encode(Probe(answer_nbytes=5)), seconds=PATIENCE)
            assert isinstance(ask_next(honest, running, left_generation=1), Standby | Assignment)
            assert "p1" in running.hub.membership.present
        assert not any("\x1b" in line for line in running.printed)


def test_no_request_of_a_newcomer_ends_the_hub(run_config):
    """An invite is a key too. Raised while it is answered, an error would end the hub's own connection."""
    with running_hub(run_config) as running, running.connection("p1") as honest:
        hub = running.hub
        invite = asyncio.run_coroutine_threadsafe(hub.admission.invite(), running.loop).result(PATIENCE)
        good = JoinRequest(public_key=KeyPair.new().public_key, numerics=hub.run_host.numerics)
        taken = JoinRequest(public_key=hub.broker.peers["p1"], numerics=hub.run_host.numerics)
        own = JoinRequest(
            public_key=KeyPair.from_seed(hub.broker.hub_credentials.seed).public_key, numerics=hub.run_host.numerics
        )
        other = JoinRequest(
            public_key=good.public_key, numerics=msgspec.structs.replace(hub.run_host.numerics, version=0)
        )
        short = NASTY[:-1]  # with the last one the server would cut the connection
        bad = [b"\x81\xaapublic_key\xa4\xff\xff\xff\xff", *packed(taken, own, other), *short]

        async def join():
            async with dialled(hub.broker, invite.id, invite.credentials) as (client, faults):
                subject, told = f"join.{invite.id}", []

                async def came(message):
                    if error_code(message.headers) is None:
                        told.append(msgspec.msgpack.decode(message.data, type=JoinAnswer).refusal)

                await client.subscribe(f"_INBOX.{invite.id}.told", cb=came)
                for data in bad:
                    await client.publish(subject, data, reply=f"_INBOX.{invite.id}.told")
                answer = await client.request(subject, msgspec.msgpack.encode(good), timeout=PATIENCE)
                assert not faults
                return told, msgspec.msgpack.decode(answer.data, type=JoinAnswer)

        told, answer = asyncio.run(join())
        assert [refusal.partition(":")[0] for refusal in told] == [
            "",  # a member is told who it is; who has not its key can do nothing with that
            "the key is invalid, in use or was removed from the run",
            "your copy of thinpipe differs from the hub's (yours has numerics version 0, the hub's "
            f"{NUMERICS_VERSION})",
        ]
        assert (answer.name, answer.refusal) == ("p2", "")
        assert msgspec.msgpack.decode(honest.request("status", b"", seconds=PATIENCE), type=Status)


def test_who_comes_back_with_other_numerics_is_refused_before_anything_begins(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        ours = running.hub.run_host.numerics
        for other, text in (
            (
                msgspec.structs.replace(ours, version=0),
                f"your copy of thinpipe differs from the hub's (yours has numerics version 0, the hub's "
                f"{NUMERICS_VERSION}): ",
            ),
            (
                msgspec.structs.replace(ours, torch="1.0\x1b[2J"),
                f"your torch differs from the hub's (yours is 1.0 [2J, the hub's {ours.torch}): ",
            ),
        ):
            answer = ask_next(connection, running, numerics=other)
            assert isinstance(answer, Refused)
            assert answer.text.startswith(text)
        assert not running.hub.membership.present
        assert ask_next(connection, running).generation == 1


def test_a_peer_that_speaks_another_version_of_the_protocol_is_told_which_to_install(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        known = msgspec.msgpack.decode(next_request(running))
        newer, older = known | {"of_a_later_version": 1}, {"incarnation": "a"}
        for request in packed(newer, older):
            answer = msgspec.msgpack.decode(connection.request("next", request, seconds=PATIENCE), type=Answer)
            assert isinstance(answer, Refused)
            assert answer.text.endswith(f"install the hub's version of thinpipe, {thinpipe.__version__}")
        assert not running.hub.membership.present


def test_all_hear_that_the_run_stops_however_late_they_begin_to_listen(run_config):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        running.hub.stop()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.5), running.loop).result(PATIENCE)
        came = []
        cancel = first.subscribe_broadcast("stop", came.append)
        wait_until(lambda: came)
        cancel()
        # one stops, the other was cut off: nothing new begins, although both are there
        asked = [
            connection.submit("next", next_request(running, left_generation=1), seconds=PATIENCE)
            for connection in (first, second)
        ]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert [type(answer).__name__ for answer in answers] == ["Finished", "Finished"]


def test_one_that_hears_of_the_same_generation_twice_does_not_undo_what_arrives(run_config, tmp_path):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        run_host = running.hub.run_host
        path = save_by_hand(run_host, 4, tmp_path)
        tell_saved(second, run_host, path)
        file, *_ = tell_saved(first, run_host, path).wanted
        entry, data = run_host.newest.manifest.files[file], (path / file).read_bytes()
        ask_as(first, "write_file", WriteChunk(name=f"step-00000004/{file}", offset=0, data=data[:10]), WriteReply)
        assert ask_next(second, running, report=report(flops=2e9)).generation == 1
        answer = ask_as(first, "write_file", BeginWrite(name=f"step-00000004/{file}", nbytes=entry.nbytes), WriteReply)
        assert (answer.stored_nbytes, answer.reason) == (10, "")


def test_a_hub_that_wants_to_write_beside_our_folder_is_refused(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        assignment = ask_next(connection, running)
        good = msgspec.to_builtins(assignment, builtin_types=(bytes,))
        assert decode_foreign(msgspec.msgpack.encode(good), Answer) == assignment
        for name in ("tokenizer/../../profile", "/etc/profile", "run.toml", "tokenizer/a\x1b[2J", "tokenizer\\a"):
            with pytest.raises(ProtocolError):
                decode_foreign(msgspec.msgpack.encode(good | {"tokenizer": [name]}), Answer)
        manifest = msgspec.json.decode(assignment.manifest, type=Manifest)
        files = {"../../profile": next(iter(manifest.files.values()))}
        hostile = msgspec.structs.replace(manifest, files=files).with_checksum()
        with pytest.raises(ProtocolError):
            received_manifest(msgspec.json.encode(hostile))
