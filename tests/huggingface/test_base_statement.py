"""What a hub states of its base: the tensors that segments read, with hashes; what a peer makes of it, and how much
memory a hub takes each segment to need."""

import asyncio
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.huggingface.models import save_model, small_config
from tests.huggingface.run_files import LORA, run_of
from thinpipe.checkpoint.state import new_manifest
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import MAX_NBYTES, ProtocolError
from thinpipe.core.safetensors_header import tensor_places
from thinpipe.models.hf.base_files import open_source
from thinpipe.models.hf.base_statement import StatedTensor, base_sha256
from thinpipe.models.hf.base_tensors import PeerBase
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.layer_plan import UnsupportedModelError
from thinpipe.models.hf.pretrained_config import read_model, transformers_config
from thinpipe.models.protocol import base_hashes
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.planning.stored_model import StoredModel, cut
from thinpipe.swarm.hub.served_base import ServedBase
from thinpipe.swarm.hub.services.files import FileReadService
from thinpipe.swarm.peer.base_transfer import BaseTransfer
from thinpipe.swarm.peer.hub_settings import model_on_a_hub
from thinpipe.swarm.protocol.base_files import STATEMENT_FILE, tensor_file
from thinpipe.swarm.protocol.file_messages import ReadChunk, ReadReply, StatFile

CUTS = (2, 5)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def model(request, tmp_path_factory):
    """Some with a tied head, one with experts that are merged when they are read."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(small_config(request.param), folder)
    return read_model(folder, CUTS)


@pytest.fixture
def served(model, tmp_path):
    return ServedBase(model, tmp_path / "hub" / "base.json")


def test_it_names_exactly_what_the_segments_read(model, served):
    segments = HuggingFaceModel(model).segments
    for index, segment in enumerate(segments):
        stated = served.statement.of_segments([index])
        assert segment.materialise(seed=0).base_hashes == {tensor.name: tensor.identity for tensor in stated}
        assert served.nbytes([index]) == sum(tensor.nbytes for tensor in stated)
    assert served.statement.of_segments(range(3)) == served.statement.tensors
    assert served.statement.base_sha256 == base_sha256(base_hashes(segments))


def ask(served, request):
    """As a peer asks the hub."""
    answer = asyncio.run(FileReadService(served.find)("p0", msgspec.msgpack.encode(request)))
    return msgspec.msgpack.decode(answer, type=ReadReply)


def bring(served, folder, tensors):
    base = PeerBase(folder)
    base.describe(served.model.stored, "")
    base.statement_path.write_bytes(served.find(STATEMENT_FILE).read_bytes())
    (folder / "tensors").mkdir()
    for tensor in tensors:
        name = tensor_file(tensor.sha256)
        found = ask(served, StatFile(name=name))
        assert (found.nbytes, found.sha256) == (tensor.nbytes, tensor.sha256)
        half = tensor.nbytes // 2
        pieces = [(0, half), (half, tensor.nbytes)]  # beyond its end too: of the next tensor nothing comes
        data = b"".join(ask(served, ReadChunk(name=name, offset=at, nbytes=max(1, size))).data for at, size in pieces)
        base.received(tensor).write_bytes(data[: tensor.nbytes])
        assert len(data) <= tensor.nbytes + 1
    return base


def test_a_segment_from_received_tensors_is_that_of_the_folder(model, served, tmp_path):
    base = bring(served, tmp_path / "base", served.statement.of_segments([1]))
    ours = HuggingFaceModel(replace(model, source=str(base.folder))).segments[1].materialise(seed=0)
    theirs = HuggingFaceModel(model).segments[1].materialise(seed=0)
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)
    assert ours.base_hashes == theirs.base_hashes
    damaged = served.statement.of_segments([1])[0]
    content = bytearray(base.received(damaged).read_bytes())
    content[-1] ^= 1
    base.received(damaged).write_bytes(content)
    with pytest.raises(UserError, match=f"{damaged.name} in .*{damaged.sha256} is not that of the hub's base"):
        HuggingFaceModel(replace(model, source=str(base.folder))).segments[1].materialise(seed=0)


def test_files_outside_of_the_base_are_not_served(served):
    for name in ("base/other", "base/" + "0" * 64, "base/config.json"):
        assert ask(served, StatFile(name=name)).reason == "the hub has no such file"


class Hub:
    """In place of a connection: a hub that states what it likes."""

    def __init__(self, content):
        self.content = content

    def submit(self, service, data, **_how):  # noqa: ARG002
        path = Path(self.content)
        return asyncio.run(FileReadService(lambda _name: path)("p0", data))

    def await_reply(self, pending, **_how):
        return pending


def test_a_statement_that_the_manifest_does_not_vouch_for_is_refused(model, served, tmp_path):
    built = HuggingFaceModel(model)
    good = new_manifest(built, base_sha256=served.statement.base_sha256)
    transfer = BaseTransfer(tmp_path / "base", None, print)
    hub = Hub(served.find(STATEMENT_FILE))
    manifest = msgspec.json.decode(msgspec.json.encode(good), type=type(good))
    assert transfer.learn(hub, manifest) == served.statement
    with pytest.raises(ProtocolError, match="the hub states a base with the sha256"):
        transfer.learn(hub, new_manifest(built, base_sha256="0" * 64))
    os.truncate(served.find(STATEMENT_FILE), MAX_NBYTES + 1)
    with pytest.raises(ProtocolError, match=r"has 8388609 bytes, more than the"):
        transfer.learn(hub, manifest)


def test_tensors_that_a_peer_lacks_are_those_without_a_file_of_its_own(model, served, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for path in Path(model.source).iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    shards = sorted(own.glob("*.safetensors"))
    shards[0].unlink()
    transfer = BaseTransfer(tmp_path / "base", own, print)
    (tmp_path / "base").mkdir()
    lost = {name for name, place in open_source(model.source).places().items() if place.path.name == shards[0].name}
    missing = {tensor.name for tensor in transfer.missing(served.statement.tensors)}
    assert missing == lost & {tensor.name for tensor in served.statement.tensors}


@pytest.mark.parametrize("way", ["full", "LoRA"])
def test_a_segment_needs_what_a_process_with_it_needs(model, served, way, tmp_path):
    """By the law of `thinpipe train`; the hub knows only names and shapes."""
    config = run_of(model.source, tmp_path, tmp_path / "run", way, degree=3, cuts=CUTS)
    shapes = [(tensor.name, tuple(tensor.shape)) for tensor in served.statement.tensors]
    stored = StoredModel.of_run(model, shapes)
    folder = cut(StoredModel.read(Path(model.source)), config)
    costs = segment_costs(stored, config)
    assert [replace(cost, download_nbytes=0) for cost in costs] == [
        replace(cost, download_nbytes=0) for cost in segment_costs(folder, config)
    ]
    full, adapted = (segment_costs(stored, replace(config, lora=lora)) for lora in (None, LORA))
    assert all(ours.flops_per_token > theirs.flops_per_token for ours, theirs in zip(full, adapted, strict=True))


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert tensor_places(path)["a"].offset == 8 + len(header)
    for content in (path.read_bytes()[:-1], b"", b"\xff" * 40, struct.pack("<Q", 2) + b"[]"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="download it again"):
            tensor_places(path)


def test_a_peer_downloads_only_a_model_that_is_pinned_to_a_commit():
    pinned = f"hf:someone/small@{COMMIT}"
    assert model_on_a_hub(f'[model]\nhf = "{pinned}"') == pinned
    for other in (
        "hf:someone/small",
        "hf:someone/small@main",
        f"hf:../x@{COMMIT}",
        f"hf:a/b/c@{COMMIT}",
        "/etc",
        "base",
    ):
        assert model_on_a_hub(f'[model]\nhf = "{other}"') == ""
    assert model_on_a_hub("[model]\nhf = 3") == model_on_a_hub("model = 3") == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": {"": "someone/kernel"}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"part": {"experts_implementation": "someone/kernel"}},
    ],
)
def test_a_config_that_asks_for_code_of_a_hub_is_refused(asked):
    with pytest.raises(UnsupportedModelError, match="which is code"):
        transformers_config(small_config("llama") | asked)


def test_a_tensor_larger_than_any_machine_is_refused():
    with pytest.raises(ValueError, match="larger than any machine"):
        StatedTensor("a", "F32", [1 << 40, 1 << 40], "0" * 64, [0])
