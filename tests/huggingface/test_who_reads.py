"""What each process of a pipeline over a Hugging Face model is sent: token ids and labels only where they are
needed."""

import json
from contextlib import ExitStack
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from tests.huggingface.captures import encoded_by_the_twin, microbatches
from tests.huggingface.models import save_model, small_config
from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import hub_services
from tests.transport.processes import results, start
from thinpipe.boundary.packing import pack_flags, unpack_ids
from thinpipe.core.token_flags import ID_MASK
from thinpipe.pipeline.p2p import LABELS_TAG, p2p_tag

PROCESSES = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_model(small_config("qwen3", tie_word_embeddings=False), folder)
    return folder


@pytest.fixture(params=["gloo", "nats"])
def transport(request, tmp_path, monkeypatch):
    """Processes that are connected directly, or through the server of a hub."""
    if request.param == "gloo":
        yield
        return
    with ExitStack() as stack:
        running = stack.enter_context(running_broker(tmp_path, tuple(f"p{rank}" for rank in range(PROCESSES))))
        stack.enter_context(hub_services(running))
        told = {
            "url": running.url,
            "fingerprint": running.fingerprint,
            "credentials": {name: asdict(each) for name, each in running.credentials.items()},
        }
        monkeypatch.setenv("BROKER", json.dumps(told))
        yield


def by_sender_and_tag(path):
    """Pipeline messages in the order of their arrival; and all bytes that came, those of collectives too."""
    messages = {tuple(map(int, name.split())): content for name, content in load_file(path).items()}
    found, everything = {}, b""
    for (_, sender, tag), content in sorted(messages.items(), key=lambda item: item[0]):
        everything += bytes(content.numpy())
        if tag >= LABELS_TAG:
            found.setdefault((sender, tag), []).append(content)
    return found, everything


def require_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def forms_of(ids):
    """Eight ids in a row as bytes, in every width in which ids are packed or kept."""
    return [b"".join(int(each).to_bytes(width, "little") for each in ids[:8]) for width in (2, 3, 4, 8)]


def shows(everything, ids_BW):
    """Whether any row of token ids is found in these bytes, from its first token or from its first label on."""
    rows = [row[begin:] for row in ids_BW for begin in (0, 1)]
    return any(form in everything for row in rows for form in forms_of(row))


@pytest.mark.usefixtures("transport")
def test_processes_between_the_ends_receive_states_gradients_and_flags_alone(base, tmp_path):
    """All bytes of every message: the twin says which they must be. Through a hub's server, and without."""
    workers = start(PROCESSES, "tests.huggingface.capture_worker", base, "1F1B", tmp_path / "captured.0")
    results(workers)
    twin, vocab_size = encoded_by_the_twin(base)
    sent = microbatches(vocab_size)
    ids = torch.cat(sent) & ID_MASK
    flags = [pack_flags(flagged) for flagged in sent]
    assert all(len(packed) == -(-flagged.numel() // 4) for packed, flagged in zip(flags, sent, strict=True))
    assert any(packed.any() for packed in flags)
    for rank in range(PROCESSES):
        found, everything = by_sender_and_tag(tmp_path / f"captured.{rank}")
        if rank == PROCESSES - 1:
            labels = found.pop((0, LABELS_TAG))
            require_equal(
                [
                    unpack_ids(one, (len(part), part.shape[1] - 1), vocab_size)
                    for one, part in zip(labels, sent, strict=True)
                ],
                [part[:, 1:] & ID_MASK for part in sent],
            )
            assert shows(everything, ids)
        if rank > 0:
            states = found.pop((rank - 1, p2p_tag(rank - 1, forward=True)))
            expected = zip(twin["states"][rank - 1], flags, strict=True)
            require_equal(states, [torch.cat(parts) for parts in expected])
        if rank < PROCESSES - 1:
            require_equal(found.pop((rank + 1, p2p_tag(rank, forward=False))), twin["gradients"][rank])
            assert not shows(everything, ids)
        assert not found, f"process {rank} also received {found.keys()}"
