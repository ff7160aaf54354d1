"""Files between a peer and the hub, through a real broker: whole and right, or an error and nothing under the name."""

import asyncio
import hashlib
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services, together
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.hub.services.files import ExpectedFile, FileReadService, FileWriteService
from thinpipe.swarm.peer.file_transfer import fetch, push, stat
from thinpipe.swarm.peer.request_pipeline import FileTransferError, RateLimiter
from thinpipe.swarm.protocol.file_messages import (
    MAX_IN_FLIGHT,
    BeginWrite,
    ReadRequest,
    StatFile,
    WriteChunk,
    WriteReply,
    WriteRequest,
)
from thinpipe.transport.nats.connection import HubConnection

MIB = 1 << 20
SIZES = [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 12_345]
LIMIT = 300.0
"""For each request, where the test is not about it."""


def content(nbytes, seed=0):
    return hashlib.shake_128(str(seed).encode()).digest(nbytes)


@cache
def sha256(data):
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """Its two services, what it was asked, and a way to slow it down."""

    folder: Path
    expected: dict[str, bytes] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)
    delay: object = None
    """Of a request, in seconds."""
    max_concurrent: int = 0

    def __post_init__(self):
        self.folder.mkdir()
        self._files = FileReadService(self.find)
        self._keeps = FileWriteService(self.accept, lambda *who: self.kept.append(who))
        self._at_once = 0

    def find(self, name):
        path = self.folder / name
        return path if path.is_file() else None

    def accept(self, peer, name):  # noqa: ARG002
        if name not in self.expected:
            return None
        data = self.expected[name]
        return ExpectedFile(target=self.folder / name, nbytes=len(data), sha256=sha256(data))

    async def file(self, peer, data):
        return await self._answer(self._files, ReadRequest, peer, data)

    async def keep(self, peer, data):
        return await self._answer(self._keeps, WriteRequest, peer, data)

    async def _answer(self, service, kind, peer, data):
        asked = decode_foreign(data, kind)
        self.asked.append(msgspec.structs.replace(asked, data=b"") if isinstance(asked, WriteChunk) else asked)
        self._at_once += 1
        self.max_concurrent = max(self.max_concurrent, self._at_once)
        seconds = self.delay(self.asked[-1]) if self.delay else 0
        if seconds:
            await asyncio.sleep(seconds)
        try:
            return await service(peer, data)
        finally:
            self._at_once -= 1


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("hub")) as broker:
        yield broker


@pytest.fixture
def hub(running, tmp_path):
    hub = Hub(tmp_path / "hub")
    with hub_services(running, read_file=hub.file, write_file=hub.keep):
        yield hub


@pytest.fixture
def connection(running, hub):  # noqa: ARG001  the hub must be there first, and leave last
    connection = HubConnection(address(running, "p0"))
    yield connection
    connection.close()


def offer(hub, data, name="data.bin"):
    (hub.folder / name).parent.mkdir(exist_ok=True)
    (hub.folder / name).write_bytes(data)
    return {"nbytes": len(data), "sha256": sha256(data), "seconds": LIMIT}


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def closing_at(connection, nbytes):
    """Progress that leaves the hub in the middle."""
    return lambda done, _: connection.close() if done >= nbytes else None


# Whole files


@pytest.mark.parametrize("nbytes", SIZES)
def test_fetch(hub, connection, tmp_path, nbytes):
    data = content(nbytes)
    promised = offer(hub, data, "step-00000200/blocks.3.safetensors")
    target, steps = tmp_path / "new" / "got", []
    fetch(
        connection, "step-00000200/blocks.3.safetensors", target, progress=lambda *step: steps.append(step), **promised
    )
    assert target.read_bytes() == data
    assert names(target.parent) == ["got"]
    assert steps[-1:] == [(nbytes, nbytes)] * bool(nbytes)
    hub.asked.clear()
    fetch(connection, "step-00000200/blocks.3.safetensors", target, **promised)
    assert not hub.asked


@pytest.mark.parametrize("nbytes", SIZES)
def test_push(hub, connection, tmp_path, nbytes):
    data, source, steps = content(nbytes), tmp_path / "source", []
    source.write_bytes(data)
    hub.expected["step-00000200/last.safetensors"] = data
    push(connection, source, "step-00000200/last.safetensors", progress=lambda *step: steps.append(step), seconds=LIMIT)
    assert (hub.folder / "step-00000200/last.safetensors").read_bytes() == data
    assert names(hub.folder) == ["last.safetensors"]
    assert hub.kept == [("p0", "step-00000200/last.safetensors")]
    assert steps[-1:] == [(nbytes, nbytes)] * bool(nbytes)
    hub.asked.clear()
    push(connection, source, "step-00000200/last.safetensors", seconds=LIMIT)
    assert hub.asked == [BeginWrite(name="step-00000200/last.safetensors", nbytes=nbytes)]


def test_stat(hub, connection):
    data = content(100_000)
    offer(hub, data)
    for _ in range(2):
        answer = stat(connection, "data.bin", seconds=LIMIT)
        assert (answer.nbytes, answer.sha256) == (len(data), sha256(data))
    offer(hub, data[::-1])
    assert stat(connection, "data.bin", seconds=LIMIT).sha256 == sha256(data[::-1])


def test_several_pieces_are_under_way(hub, connection, tmp_path):
    hub.delay = lambda _: 0.1
    fetch(connection, "data.bin", tmp_path / "got", **offer(hub, content(8 * MIB)))
    assert hub.max_concurrent == 4
    (tmp_path / "source").write_bytes(content(4 * MIB))
    hub.expected["pushed"] = content(4 * MIB)
    hub.max_concurrent = 0
    push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    assert hub.max_concurrent == 8


def test_two_peers_at_once(hub, running, connection, tmp_path):
    other = HubConnection(address(running, "p1"))
    shared = offer(hub, content(4 * MIB + 1))
    for name in ("one", "two", "both"):
        hub.expected[name] = content(3 * MIB + 5, name)
        (tmp_path / name).write_bytes(hub.expected[name])
    try:
        together(
            lambda: fetch(connection, "data.bin", tmp_path / "got1", **shared),
            lambda: fetch(other, "data.bin", tmp_path / "got2", **shared),
            lambda: push(connection, tmp_path / "one", "one", seconds=LIMIT),
            lambda: push(other, tmp_path / "two", "two", seconds=LIMIT),
        )
        together(*(lambda who=who: push(who, tmp_path / "both", "both", seconds=LIMIT) for who in (connection, other)))
    finally:
        other.close()
    assert (tmp_path / "got1").read_bytes() == (tmp_path / "got2").read_bytes() == content(4 * MIB + 1)
    assert {name: (hub.folder / name).read_bytes() for name in hub.expected} == hub.expected
    assert set(hub.kept) == {("p0", "one"), ("p1", "two"), ("p0", "both"), ("p1", "both")}


def test_speed(hub, connection, tmp_path):
    data = content(48 * MIB)
    (tmp_path / "source").write_bytes(data)
    hub.expected["pushed"] = data
    promised = offer(hub, data)
    for what in ("fetch", "push"):
        start = time.monotonic()
        if what == "fetch":
            fetch(connection, "data.bin", tmp_path / "got", **promised)
        else:
            push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
        print(f"{what}: {len(data) / 1e6 / (time.monotonic() - start):.0f} MB/s over loopback")
    assert (tmp_path / "got").read_bytes() == (hub.folder / "pushed").read_bytes() == data


def test_a_share_of_the_line(hub, connection, tmp_path):
    data = content(MIB)
    (tmp_path / "source").write_bytes(data)
    hub.expected["pushed"] = data
    start = time.monotonic()
    push(connection, tmp_path / "source", "pushed", seconds=LIMIT, rate_limiter=RateLimiter(2 * MIB))
    assert time.monotonic() - start >= 0.375  # the fourth quarter leaves when three have passed
    with pytest.raises(ValueError, match="above 0"):
        RateLimiter(0)


# Connections that end


def test_fetch_goes_on_after_a_cut(hub, running, connection, tmp_path):
    data = content(9 * MIB + 7)
    promised, target = offer(hub, data), tmp_path / "got"
    with pytest.raises(ConnectionError):
        fetch(connection, "data.bin", target, progress=closing_at(connection, 3 * MIB), **promised)
    assert names(tmp_path / "hub") == ["data.bin"]
    stored_nbytes = (tmp_path / "got.partial").stat().st_size
    assert 3 * MIB <= stored_nbytes < len(data)
    assert not target.exists()
    hub.asked.clear()
    again = HubConnection(address(running, "p0"))
    fetch(again, "data.bin", target, **promised)
    again.close()
    assert target.read_bytes() == data
    assert min(asked.offset for asked in hub.asked) == stored_nbytes
    assert not (tmp_path / "got.partial").exists()


def test_push_goes_on_after_a_cut(hub, running, connection, tmp_path):
    data = content(9 * MIB + 7)
    (tmp_path / "source").write_bytes(data)
    hub.expected["pushed"] = data
    with pytest.raises(ConnectionError):
        push(connection, tmp_path / "source", "pushed", progress=closing_at(connection, 3 * MIB), seconds=LIMIT)
    assert names(hub.folder) == ["pushed.p0.partial"]
    assert not hub.kept
    hub.asked.clear()
    again = HubConnection(address(running, "p0"))
    push(again, tmp_path / "source", "pushed", seconds=LIMIT)
    again.close()
    assert (hub.folder / "pushed").read_bytes() == data
    assert min(asked.offset for asked in hub.asked if isinstance(asked, WriteChunk)) >= 3 * MIB
    assert names(hub.folder) == ["pushed"]


@pytest.mark.parametrize("leaves", ["post", "broker"])
def test_a_lost_hub_is_told_at_once(tmp_path, leaves):
    """Although requests are under way that have much time left."""
    hub = Hub(tmp_path / "hub")
    hub.delay = lambda _: 900  # longer than a test may take
    promised = offer(hub, content(3 * MIB)) | {"seconds": 900}
    (tmp_path / "source").write_bytes(content(MIB))
    hub.expected["pushed"] = content(MIB)
    with running_broker(tmp_path) as running, hub_services(running, read_file=hub.file, write_file=hub.keep):
        connection = HubConnection(address(running, "p0"))

        def lose():
            while len(hub.asked) < 4:
                time.sleep(0.01)
            if leaves == "post":
                connection.close()
            else:
                os.kill(running.broker.server_pid, signal.SIGKILL)

        def move(action, *rest, **settings):
            with pytest.raises(ConnectionError):
                action(connection, *rest, **settings)

        together(
            lose,
            lambda: move(fetch, "data.bin", tmp_path / "got", **promised),
            lambda: move(push, tmp_path / "source", "pushed", seconds=900),
        )
        connection.close()


def test_no_hub_at_the_broker(running, tmp_path):
    connection = HubConnection(address(running, "p1"))
    with pytest.raises(ConnectionError, match="the hub is not running"):
        fetch(connection, "data.bin", tmp_path / "got", nbytes=5, sha256="0" * 64)
    connection.close()


def test_a_hub_that_does_not_answer(hub, connection, tmp_path):
    hub.delay = lambda _: 3
    with pytest.raises(TimeoutError):
        fetch(connection, "data.bin", tmp_path / "got", **offer(hub, content(5)) | {"seconds": 0.2})


def test_pieces_that_overtake_each_other(hub, connection, tmp_path):
    data = content(3 * MIB)
    (tmp_path / "source").write_bytes(data)
    hub.expected["pushed"] = data
    slow = iter([0.3, 0, 0.2])
    hub.delay = lambda asked: next(slow, 0) if isinstance(asked, WriteChunk) else 0
    push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    assert (hub.folder / "pushed").read_bytes() == data


# What is not as promised


@pytest.mark.parametrize(
    "changed", [b"x" * 5 * MIB, b"x" * 5 * MIB + b"y", b"short"], ids=["same", "longer", "shorter"]
)
def test_a_file_that_changes_while_it_is_fetched(hub, connection, tmp_path, changed):
    promised = offer(hub, content(5 * MIB))

    def change(done, _):
        if done == MIB:
            (hub.folder / "data.bin").write_bytes(changed)

    with pytest.raises(FileTransferError, match="download it again"):
        fetch(connection, "data.bin", tmp_path / "got", progress=change, window=1, **promised)
    assert names(tmp_path) == ["data.bin"]


def test_a_wrong_hash_is_not_kept(hub, connection, tmp_path):
    promised = offer(hub, content(MIB + 3)) | {"sha256": sha256(b"other")}
    with pytest.raises(FileTransferError, match="wrong sha256"):
        fetch(connection, "data.bin", tmp_path / "got", **promised)
    assert names(tmp_path) == ["data.bin"]
    hub.expected["pushed"] = content(MIB + 3, "other")
    (tmp_path / "source").write_bytes(content(MIB + 3))
    with pytest.raises(FileTransferError, match="wrong sha256"):
        push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    assert names(hub.folder) == ["data.bin"]
    assert not hub.kept


def test_leftovers_of_another_file(hub, connection, tmp_path):
    data = content(MIB)
    promised = offer(hub, data)
    (tmp_path / "got.partial").write_bytes(bytes(MIB + 1))
    fetch(connection, "data.bin", tmp_path / "got", **promised)
    assert (tmp_path / "got").read_bytes() == data
    (tmp_path / "got").write_bytes(b"old")
    fetch(connection, "data.bin", tmp_path / "got", **promised)
    assert (tmp_path / "got").read_bytes() == data


@pytest.mark.parametrize("name", ["unknown", "folder", "data.bin/x"])
def test_names_that_the_hub_does_not_give(hub, connection, tmp_path, name):
    (tmp_path / "secret").write_bytes(b"secret")
    (hub.folder / "folder").mkdir()
    offer(hub, b"data")
    with pytest.raises(FileTransferError, match="no such file"):
        stat(connection, name, seconds=LIMIT)
    with pytest.raises(FileTransferError, match="no such file"):
        fetch(connection, name, tmp_path / "got", nbytes=6, sha256=sha256(b"secret"), seconds=LIMIT)
    with pytest.raises(FileTransferError, match="does not expect this file"):
        push(connection, tmp_path / "secret", name, seconds=LIMIT)
    assert names(tmp_path) == ["data.bin", "secret"]


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "a\0b"])
def test_a_name_that_leads_out_is_refused_even_if_the_hub_would_give_it(name):
    asked = []
    services = FileReadService(asked.append), FileWriteService(lambda *name: asked.append(name), lambda *_: None)
    for service, request in zip(services, (StatFile(name=name), BeginWrite(name=name, nbytes=6)), strict=True):
        with pytest.raises(ProtocolError):
            asyncio.run(service("p0", msgspec.msgpack.encode(request)))
    assert not asked


def test_a_file_of_another_size_is_refused_before_it_is_sent(hub, connection, tmp_path):
    (tmp_path / "source").write_bytes(bytes(3 * MIB))
    hub.expected["pushed"] = bytes(MIB)
    with pytest.raises(FileTransferError, match=f"expects {MIB} bytes, and the file has {3 * MIB}"):
        push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    assert len(hub.asked) == 1


def test_a_full_disk_at_the_hub(hub, connection, tmp_path):
    data = content(3 * MIB)
    (tmp_path / "source").write_bytes(data)
    hub.expected["pushed"] = data
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1000, before[1]))
    try:
        with pytest.raises(FileTransferError, match="cannot write the file"):
            push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(hub.folder) == ["pushed.p0.partial"]
    push(connection, tmp_path / "source", "pushed", seconds=LIMIT)
    assert (hub.folder / "pushed").read_bytes() == data


def test_our_own_disk_is_full(hub, connection, tmp_path):
    promised = offer(hub, content(3 * MIB))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 1000, before[1]))
    try:
        with pytest.raises(FileTransferError, match="cannot be written") as caught:
            fetch(connection, "data.bin", tmp_path / "got", **promised)
        assert isinstance(caught.value.__cause__, OSError), "so that a caller can tell a full disk from other trouble"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    fetch(connection, "data.bin", tmp_path / "got", **promised)
    assert (tmp_path / "got").read_bytes() == content(3 * MIB)


# Peers that do not keep to the rules


def test_what_one_peer_sends_stands_in_no_others_way(hub):
    """As when a file of a commit that the hub has lost is asked of all: one sends rubbish, and waits with the end."""
    data = content(1000)
    hub.expected["pushed"] = data
    service = FileWriteService(hub.accept, lambda *_: None)

    def told(peer, request):
        return msgspec.msgpack.decode(asyncio.run(service(peer, msgspec.msgpack.encode(request))), type=WriteReply)

    assert told("mallory", WriteChunk(name="pushed", offset=0, data=b"x" * 999)).stored_nbytes == 999
    assert told("anna", BeginWrite(name="pushed", nbytes=1000)).stored_nbytes == 0
    assert told("anna", WriteChunk(name="pushed", offset=0, data=data[:600])).stored_nbytes == 600
    assert "wrong sha256" in told("mallory", WriteChunk(name="pushed", offset=999, data=b"x")).reason
    assert told("mallory", WriteChunk(name="pushed", offset=0, data=b"x")).stored_nbytes == 1
    assert told("anna", WriteChunk(name="pushed", offset=600, data=data[600:])).complete
    assert (hub.folder / "pushed").read_bytes() == data
    assert names(hub.folder) == ["pushed"]
    assert told("mallory", BeginWrite(name="pushed", nbytes=1000)).complete


def tell(connection, request):
    answer = connection.submit("write_file", msgspec.msgpack.encode(request), seconds=LIMIT, bulk=True).result(
        timeout=LIMIT
    )
    return msgspec.msgpack.decode(answer, type=WriteReply)


def test_wrong_offsets_and_too_much(hub, connection):
    data = content(1000)
    hub.expected["pushed"] = data
    assert tell(connection, WriteChunk(name="pushed", offset=5, data=b"xx")).stored_nbytes == 0
    assert names(hub.folder) == []
    assert tell(connection, WriteChunk(name="pushed", offset=0, data=data[:600])).stored_nbytes == 600
    for offset in (0, 599, 601, 1000, 1 << 50):
        answer = tell(connection, WriteChunk(name="pushed", offset=offset, data=data[:400]))
        assert (answer.stored_nbytes, answer.complete) == (600, False)
    too_much = tell(connection, WriteChunk(name="pushed", offset=600, data=data[:401]))
    assert too_much.stored_nbytes == 600
    assert "at most 1000 bytes" in too_much.reason
    assert (hub.folder / "pushed.p0.partial").stat().st_size == 600
    assert tell(connection, WriteChunk(name="pushed", offset=600, data=data[600:])).complete
    assert tell(connection, WriteChunk(name="pushed", offset=1000, data=b"more")).complete
    assert (hub.folder / "pushed").read_bytes() == data
    assert names(hub.folder) == ["pushed"]


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(2 * MIB), b"\x91" * 100_000], ids=len)
@pytest.mark.parametrize("service", ["read_file", "write_file"])
def test_garbage_is_refused(hub, connection, service, data):
    """At once, or not received at all if it is larger than the service takes."""
    with pytest.raises((ProtocolError, TimeoutError), match=r"cannot read|asks too much|did not answer"):
        connection.submit(service, data, seconds=0.3, bulk=True).result(timeout=5)
    offer(hub, b"data")
    assert stat(connection, "data.bin", seconds=LIMIT).nbytes == 4


def test_one_peer_cannot_make_the_hub_hold_much(hub):
    hub.expected["pushed"] = content(MIB)
    service = FileWriteService(hub.accept, lambda *_: None)
    request = msgspec.msgpack.encode(WriteChunk(name="pushed", offset=0, data=content(MIB)[:-1]))

    async def flood():
        answers = await asyncio.gather(*(service("p0", request) for _ in range(500)), service("p1", request))
        return [msgspec.msgpack.decode(answer, type=WriteReply) for answer in answers]

    *of_one, of_other = asyncio.run(flood())
    assert sum("in flight" in answer.reason for answer in of_one) == 500 - MAX_IN_FLIGHT
    assert not of_other.reason
    assert (hub.folder / "pushed.p0.partial").stat().st_size == MIB - 1


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux to know its memory")
def test_a_flood_does_not_fill_memory(hub, connection):
    hub.expected["pushed"] = content(MIB)
    offer(hub, b"data")
    flood = [bytes(MIB), msgspec.msgpack.encode(WriteChunk(name="pushed", offset=1, data=bytes(MIB)))]
    stop, peak = threading.Event(), [resident_nbytes()]
    before = peak[0]

    def watch():
        while not stop.wait(0.01):
            peak[0] = max(peak[0], resident_nbytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for index in range(160):
        connection.publish("write_file", flood[index % 2])
    assert connection.request("read_file", msgspec.msgpack.encode(StatFile(name="data.bin")), seconds=LIMIT)
    begin = msgspec.msgpack.encode(BeginWrite(name="pushed", nbytes=MIB))
    assert connection.request("write_file", begin, seconds=LIMIT), "what was too much is dropped, and this is not"
    stop.set()
    watcher.join()
    assert peak[0] - before < 80 * MIB


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
