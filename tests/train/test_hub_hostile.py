"""A peer that belongs, and sends the hub whatever it likes: the hub answers the others as before."""

import asyncio
import math
import random
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.swarm.brokers import dialled
from tests.train.commits import wait_until
from tests.train.hubs import ask_as, ask_next, begin_epoch, next_request, report, running_hub
from tests.train.programs import PATIENCE
from thinpipe.core.errors import UserError
from thinpipe.core.events import Saved, Skipped
from thinpipe.core.numerics import NUMERICS_VERSION
from thinpipe.swarm.file_requests import Begin, Chunk, FileAnswer, KeepAnswer, Read, Stat
from thinpipe.swarm.keys import KeyPair
from thinpipe.swarm.line_test import Probe
from thinpipe.swarm.messages import (
    AdminRequest,
    Answer,
    EventTold,
    JoinAnswer,
    JoinRequest,
    LeaveRequest,
    Ready,
    Refused,
    SavedRequest,
    TokensRequest,
    Verdict,
    Wait,
    Work,
)
from thinpipe.swarm.status import Status
from thinpipe.train.config import JobSection
from thinpipe.train.hub_supplies import HubSupplies
from thinpipe.transport.nats.progress import Beat
from thinpipe.transport.nats.requests import Answered, Asked

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
    bytes(3 << 20),
]


def packed(*fields):
    return [msgspec.msgpack.encode(each) for each in fields]


def seeds_for(running):
    """Requests that make sense, and some that nearly do, by service."""
    newest = running.hub.hosted.newest
    manifest = msgspec.json.encode(newest.manifest)
    deep = manifest.replace(b'"model":{', b'"model":{"x":' + b"[" * 5000 + b"]" * 5000 + b",")
    later = msgspec.structs.replace(newest.manifest, step=3)
    negative = {name: msgspec.structs.replace(entry, nbytes=-5) for name, entry in later.files.items()}
    manifests = [manifest, deep, *(msgspec.json.encode(m.sealed()) for m in (
        later, msgspec.structs.replace(later, step=10**12), msgspec.structs.replace(later, files=negative)
    ))]  # fmt: skip
    name = f"{newest.path.name}/{next(iter(newest.manifest.files))}"
    nan, inf = math.nan, math.inf
    asked = msgspec.to_builtins(msgspec.msgpack.decode(next_request(running)))
    return {
        "beat": packed(Beat(), Beat(epoch=1, marks=3, quiet_s=1.5, waits_for="p1", steps=2, stepping=True)),
        "event": [
            msgspec.json.encode(Saved(step=1, path="a", nbytes=1, seconds=1.0)),
            *packed(
                EventTold(epoch=1, event=msgspec.json.encode(Saved(step=1, path="a", nbytes=1, seconds=1.0))),
                EventTold(epoch=1, event=msgspec.json.encode(Skipped(step=1, loss=None, culprit="\x1b[2J"))),
                EventTold(epoch=1, event=NASTY[3]),
                {"epoch": -1, "event": b""},
            ),
        ],
        "status": packed(0),
        "admin": packed(AdminRequest(what="kick", name="p1"), AdminRequest(what="stop"), {"what": "status"}),
        "store": packed(
            Asked(what="set", keys=["a"], value=b"x"),
            Asked(what="set", keys=["a" * 100_000], value=b"x"),
            Asked(what="set", keys=["a", "b"]),
            Asked(what="get"),
            Asked(what="add", keys=["a"], amount=1 << 40),
            Asked(what="swap"),
            Asked(what="wait", keys=["a"]),
            {"what": "get", "keys": ["none"], "wait_seconds": nan},
            {"what": "get", "keys": ["none"], "wait_seconds": -inf},
            {"what": "add", "keys": ["a"], "amount": 1 << 63},
        ),
        "file": packed(Stat(name=name), Read(name=name, offset=0, nbytes=9), Read(name=name, offset=1 << 50, nbytes=1)),
        "keep": packed(Begin(name=name, nbytes=7), Chunk(name=name, offset=0, data=b"abc")),
        "line": packed(Probe(answer_nbytes=1), {"answer_nbytes": -1}, {"answer_nbytes": 1 << 30}),
        "tokens": packed(
            TokensRequest(split="train", index=0),
            TokensRequest(split="train", index=1 << 62),
            TokensRequest(split="validation", index=1 << 62),
            {"split": "train", "index": -1},
            {"split": "train", "index": (1 << 64) - 1},
        ),
        "saved": packed(*(SavedRequest(epoch=1, manifest=each, files=[name]) for each in manifests)),
        "ready": packed({"epoch": 1, "hashes": {}, "more": 1}, Ready(epoch=1, hashes={"basis": "0"})),
        "next": [
            next_request(running, life="b"),
            *packed(
                *(asked | {"together_bps": rates} for rates in ((nan, 1.0), (0.0, 1.0), (-1.0, 1.0), (inf, inf))),
                asked | {"took_part_in": (1 << 64) - 1},
                asked | {"why": "\x1b[2J" * 1000},
                asked | {"code": "another"},
                asked | {"life": ["x"]},
            ),
        ],
        "leave": packed(0, LeaveRequest(life="a"), LeaveRequest(life="another")),
    }


EXPECTED = {
    "status": Status,
    "store": Answered,
    "file": FileAnswer,
    "keep": KeepAnswer,
    "saved": Verdict,
    "ready": Verdict,
    "next": Answer,
    "leave": Verdict,
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
    with running_hub(run_config) as running:

        async def attack(services):
            broker = running.hub.broker
            answers = {service: [] for service in services}
            async with dialled(broker, "p0", running.seeds["p0"]) as (client, faults):
                for service, seeds in services.items():

                    async def came(message, service=service):
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

        with running.post("p0") as hostile, running.post("p1") as honest:
            works = begin_epoch(running, hostile, honest)
            assert works[0].names == ["p0", "p1"], "the hostile one is the first, whose events are believed"
            answers = asyncio.run(attack(seeds_for(running)))
            for service, given in answers.items():
                for data in given:
                    if service in EXPECTED:
                        msgspec.msgpack.decode(data, type=EXPECTED[service])
                    else:
                        assert service in ("line", "tokens")
            assert not [service for service in EXPECTED if not answers[service]], "each answers what makes sense"
            assert not answers["admin"], "that is for the owner"

            assert isinstance(ask_as(honest, "store", Asked(what="set", keys=["k"], value=b"v"), Answered), Answered)
            assert honest.request("line", msgspec.msgpack.encode(Probe(answer_nbytes=5)), seconds=PATIENCE)
            assert isinstance(ask_next(honest, running, took_part_in=1), Wait | Work)
            assert "p1" in running.hub.roster.present
        assert not any("\x1b" in line for line in running.said)


def test_no_request_of_a_newcomer_ends_the_hub(run_config):
    """An invite is a key too. Raised while it is answered, an error would end the hub's own connection."""
    with running_hub(run_config) as running, running.post("p1") as honest:
        hub = running.hub
        invite = asyncio.run_coroutine_threadsafe(hub.gate.invite(), running.loop).result(PATIENCE)
        good = JoinRequest(public_key=KeyPair.new().public_key, numerics=hub.hosted.numerics)
        taken = JoinRequest(public_key=hub.broker.peers["p1"], numerics=hub.hosted.numerics)
        own = JoinRequest(public_key=KeyPair.from_seed(hub.broker.hub_seed).public_key, numerics=hub.hosted.numerics)
        other = JoinRequest(
            public_key=good.public_key, numerics=msgspec.structs.replace(hub.hosted.numerics, version=0)
        )
        bad = [b"\x81\xaapublic_key\xa4\xff\xff\xff\xff", *packed(taken, own, other), *NASTY]

        async def join():
            async with dialled(hub.broker, invite.id, invite.seed) as (client, faults):
                subject, told = f"join.{invite.id}", []

                async def came(message):
                    told.append(msgspec.msgpack.decode(message.data, type=JoinAnswer).refusal)

                await client.subscribe(f"_INBOX.{invite.id}.told", cb=came)
                for data in bad:
                    await client.publish(subject, data, reply=f"_INBOX.{invite.id}.told")
                answer = await client.request(subject, msgspec.msgpack.encode(good), timeout=PATIENCE)
                assert not faults
                return told, msgspec.msgpack.decode(answer.data, type=JoinAnswer)

        told, answer = asyncio.run(join())
        assert [refusal.partition(":")[0] for refusal in told] == [
            "this key cannot be used",
            "this key cannot be used",
            f"you compute with numerics version 0 and the hub with {NUMERICS_VERSION}",
        ]
        assert (answer.name, answer.refusal) == ("p2", "")
        assert msgspec.msgpack.decode(honest.request("status", b"", seconds=PATIENCE), type=Status)


def test_who_comes_back_with_other_numerics_is_refused_before_anything_begins(run_config):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        ours = running.hub.hosted.numerics
        for other, text in (
            (
                msgspec.structs.replace(ours, version=0),
                f"you compute with numerics version 0 and the hub with {NUMERICS_VERSION}: ",
            ),
            (
                msgspec.structs.replace(ours, torch="1.0\x1b[2J"),
                f"you compute with torch 1.0 [2J and the hub with {ours.torch}: ",
            ),
        ):
            answer = ask_next(post, running, numerics=other)
            assert isinstance(answer, Refused)
            assert answer.text.startswith(text)
        assert not running.hub.roster.present
        assert ask_next(post, running).epoch == 1


def test_all_hear_that_the_run_stops_however_late_they_begin_to_listen(run_config):
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        begin_epoch(running, first, second)
        running.hub.stop()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.5), running.loop).result(PATIENCE)
        came = []
        cancel = first.listen("stop", came.append)
        wait_until(lambda: came)
        cancel()
        # one stops, the other was cut off: nothing new begins, although both are there
        asked = [post.ask("next", next_request(running, took_part_in=1), seconds=PATIENCE) for post in (first, second)]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert [type(answer).__name__ for answer in answers] == ["Done", "Done"]


def test_one_that_hears_of_the_same_epoch_twice_does_not_undo_what_arrives(run_config):
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        begin_epoch(running, first, second)
        newest = running.hub.hosted.newest.manifest
        manifest = msgspec.json.encode(msgspec.structs.replace(newest, step=4).sealed())
        assert (
            ask_as(first, "saved", SavedRequest(epoch=1, manifest=manifest, files=list(newest.files)), Verdict)
            == Verdict()
        )
        file, entry = next(iter(newest.files.items()))
        data = (running.hub.hosted.newest.path / file).read_bytes()
        ask_as(first, "keep", Chunk(name=f"step-00000004/{file}", offset=0, data=data[:10]), KeepAnswer)
        assert ask_next(second, running, report=report(flops=2e9)).epoch == 1
        answer = ask_as(first, "keep", Begin(name=f"step-00000004/{file}", nbytes=entry.nbytes), KeepAnswer)
        assert (answer.have, answer.reason) == (10, "")


def test_a_hub_that_wants_to_write_beside_our_folder_is_refused(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        work = ask_next(post, running)
        config = replace(run_config, job=JobSection(dump_folder=tmp_path / "peer"))
        for name in ("tokenizer/../../profile", "/etc/profile", "run.toml"):
            supplies = HubSupplies(post, msgspec.structs.replace(work, tokenizer=[name]), config, print)
            with closing(supplies), pytest.raises(UserError, match="the hub wants to write to"):
                supplies.fetch((), ())
