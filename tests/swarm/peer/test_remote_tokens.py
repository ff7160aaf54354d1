"""Batches that a hub sends: those of chats with their flags, and nothing that is no token."""

import io
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tests.data.chats import write_run_data
from thinpipe.config.run import DataConfig
from thinpipe.core.token_flags import BEGINS, TRAINED
from thinpipe.data import Cursor
from thinpipe.models import build
from thinpipe.swarm.hub.step_record import make_step_layout
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.peer.remote_run import RemoteTokens
from thinpipe.swarm.protocol.messages import TokensRequest
from thinpipe.training.console import LineDisplay
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.step_vector import TRAINED_TOKENS


class Hub:
    """In place of a connection: answers at once, with what `serve` says."""

    def __init__(self, serve):
        self.serve = serve

    def submit(self, _service, data, *, seconds, bulk):  # noqa: ARG002
        request, answer = msgspec.msgpack.decode(data, type=TokensRequest), Future()
        answer.set_result(self.serve(request.split, request.index))
        return answer

    def await_reply(self, answer, *, seconds):  # noqa: ARG002
        return answer.result()


@pytest.fixture
def chat_config(run_config, tmp_path):
    return replace(run_config, data=DataConfig(path=write_run_data(tmp_path / "chats", longest=17)))


@pytest.mark.parametrize("chats", [True, False])
def test_a_peer_gets_the_batches_of_the_hub_with_their_flags(chats, chat_config, run_config):
    config = chat_config if chats else run_config
    host = TrainingHost(config, LineDisplay(Console(file=io.StringIO()), log_freq=1))
    try:
        local = LocalTokens(config)
        remote = RemoteTokens(Hub(host.tokens), local.dataset_info, config)
        for seen in (0, 8, 16):
            batch = remote.batch(Cursor(samples_seen=seen))
            assert np.array_equal(batch, local.batch(Cursor(samples_seen=seen)))
            assert bool((batch & (TRAINED | BEGINS)).any()) == chats
        for found, expected in zip(remote.validation, local.validation, strict=True):
            assert np.array_equal(found, expected)
    finally:
        host.close()


@pytest.mark.parametrize("chats", [True, False])
def test_ids_beyond_the_vocabulary_are_refused(chats, chat_config, run_config):
    config = chat_config if chats else run_config
    info = LocalTokens(config).dataset_info
    ids = np.zeros(8 * 17, "<u4" if chats else "<u2")
    ids[5] = 64 | (TRAINED if chats else 0)
    with pytest.raises(ConnectionError, match="the hub sent id 64 of a vocabulary of 64"):
        RemoteTokens(Hub(lambda _split, _index: ids.tobytes()), info, config).batch(Cursor())
    with pytest.raises(ConnectionError, match="instead of a batch of 8 x 17"):
        RemoteTokens(Hub(lambda _split, _index: ids.tobytes()[4:]), info, config).batch(Cursor())


def test_the_hub_knows_where_the_number_of_trained_tokens_is_and_whose_it_is(chat_config):
    model = build(chat_config.model.resolve(64))
    plain, layout = (make_step_layout(model, chat_config, (1, 2), chats=chats) for chats in (False, True))
    assert layout.vector.size == plain.vector.size + 1
    assert layout.owners()[layout.vector.parts[TRAINED_TOKENS]].tolist() == [1]
