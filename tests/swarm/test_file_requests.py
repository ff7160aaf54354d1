"""Requests about files from anyone: decoded within their bounds, or not at all."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.hub.services.files import FileReadService, FileWriteService
from thinpipe.swarm.protocol.file_messages import (
    MAX_CHUNK_NBYTES,
    BeginWrite,
    ReadChunk,
    ReadReply,
    ReadRequest,
    StatFile,
    WriteChunk,
    WriteReply,
    WriteRequest,
)

GOOD = [
    StatFile(name="a/b"),
    ReadChunk(name="a", offset=0, nbytes=1),
    BeginWrite(name="a", nbytes=7),
    WriteChunk(name="a", offset=3, data=b"xyz"),
]


def check(data):
    for kind in (ReadRequest, WriteRequest):
        try:
            found = decode_foreign(data, kind)
        except ProtocolError:
            continue
        assert 1 <= len(found.name) <= 512
        assert getattr(found, "offset", 0) >= 0
        if isinstance(found, ReadChunk):
            assert 1 <= found.nbytes <= MAX_CHUNK_NBYTES
        if isinstance(found, WriteChunk):
            assert len(found.data) <= MAX_CHUNK_NBYTES
    for service in (FileReadService(lambda _: None), FileWriteService(lambda *_: None, lambda *_: None)):
        try:
            answer = asyncio.run(service("p0", data))
        except ProtocolError:
            continue
        kind = ReadReply if isinstance(service, FileReadService) else WriteReply
        assert msgspec.msgpack.decode(answer, type=kind).reason


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data):
    check(data)


VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["stat", "read", "begin", "chunk", "other"]), st.dictionaries(st.text(), VALUES), st.data())
def test_any_values_in_the_right_places(tag, more, data):
    fields = {name: data.draw(VALUES) for name in ("name", "offset", "nbytes", "data")}
    check(msgspec.msgpack.encode({"type": tag, **fields, **more}))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(GOOD), st.integers(0, 60), st.binary(max_size=5))
def test_damaged_requests(request, place, damage):
    data = msgspec.msgpack.encode(request)
    check(data[:place] + damage + data[place + len(damage) :])
    check(data[:place])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 500_000,
        b"\x82\xa1z" + b"\x91" * 500_000 + b"\xa4type\xa4stat",
        b"\x82\xa4type\xa1\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode(WriteChunk(name="a", offset=0, data=bytes(MAX_CHUNK_NBYTES + 1))),
        bytes(8 << 20),
    ],
    ids=["nothing", "deep", "deep in a field", "no utf-8", "huge map", "huge bytes", "long piece", "long"],
)
def test_what_is_no_request(data):
    for kind in (ReadRequest, WriteRequest):
        with pytest.raises(ProtocolError):
            decode_foreign(data, kind)


@pytest.mark.parametrize("request_", GOOD, ids=lambda request: type(request).__name__)
def test_good_requests_arrive_as_they_were(request_):
    kind = ReadRequest if isinstance(request_, ReadRequest) else WriteRequest
    assert decode_foreign(msgspec.msgpack.encode(request_), kind) == request_


@pytest.mark.parametrize(
    "name", ["tokenizer/tokenizer.json", "step-00000200/blocks.3.safetensors", "a", "...x", "Größe"]
)
def test_plain_names(name):
    request = StatFile(name=name)
    assert decode_foreign(msgspec.msgpack.encode(request), ReadRequest) == request


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/../b", "a/..", "/etc/passwd", "a//b", "a/", "a\\b", "c:a", "a\0b", "a\nb", " a", "..."],
)
def test_names_that_lead_elsewhere(name):
    with pytest.raises(ProtocolError):
        decode_foreign(msgspec.msgpack.encode(StatFile(name=name)), ReadRequest)
