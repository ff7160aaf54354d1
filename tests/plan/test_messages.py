"""Lengths that plans count with, against those that methods state and against messages that are really encoded."""

from dataclasses import replace

import pytest
import torch

from tests.pipeline.cases import CASES, config_of
from thinpipe.boundary.contract import MessageId
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.boundary.sizes import MESSAGE_LAYOUTS, ROW_SIZES
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.core.token_flags import BEGINS, TRAINED
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.planning.messages import MessageSizes, message_sizes

MESSAGE_ID = MessageId(seed=0, step=0, microbatch=0, boundary=0)


@pytest.mark.parametrize("vocabulary", [64, 70_000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lengths_are_those_of_real_messages(case, vocabulary):
    """Every method, format, compressor and memory: the contract test sees to it that each has a case."""
    config = config_of(case, 2, "1F1B")
    sizes = replace(config.parallelism, pipeline_parallel_microbatch_size=2)
    config = replace(config, parallelism=sizes, training=TrainingConfig(steps=9, global_batch_size=4, seq_len=11))
    model = config.model.resolve(vocabulary)
    said, method = message_sizes(model, config), boundary_method(model, config)
    assert (said.forward_nbytes, said.backward_nbytes) == (method.forward_nbytes, method.backward_nbytes)
    assert said.ids_nbytes == method.shape.ids_nbytes

    state = torch.randn(2, 11, model.state_width, generator=torch.Generator().manual_seed(0))
    ids_BW = torch.arange(24).view(2, 12)
    sent = method.pack_forward(ids_BW, state, MESSAGE_ID)
    method.unpack_forward(sent, MESSAGE_ID)
    assert (sent.dtype, sent.numel()) == (torch.uint8, said.forward_nbytes)
    assert method.pack_backward(state, MESSAGE_ID).numel() == said.backward_nbytes


@pytest.mark.parametrize("chats", [False, True])
def test_a_model_whose_segments_need_no_ids_sends_them_to_none(chats):
    """Labels are a message of their own, of the length that a plan counts."""
    config = config_of(CASES[0], 2, "1F1B")
    config = replace(config, training=TrainingConfig(steps=9, global_batch_size=4, seq_len=11))
    model = HuggingFaceModelConfig(source="", stored={}, vocab_size=70_000, dim=8, n_layers=4, boundaries=(1, 2))
    said = message_sizes(model, config, chats=chats)
    method = boundary_method(model, config, chats=chats)
    rows = config.microbatch_size * 11
    assert said.labels_nbytes == method.shape.labels_nbytes == 3 * rows
    assert said.traffic(config).labels_nbytes == 3
    state = torch.randn(config.microbatch_size, 11, 8, generator=torch.Generator().manual_seed(0))
    ids_BW = torch.arange(config.microbatch_size * 12).view(-1, 12) + 60_000
    flags_BW = (BEGINS | TRAINED) * (ids_BW % 3 == 0) + TRAINED * (ids_BW % 3 == 1) if chats else 0 * ids_BW
    sent = method.pack_forward(ids_BW | flags_BW, state, MESSAGE_ID)
    assert sent.numel() == said.forward_nbytes == method.states.compressor.nbytes + said.ids_nbytes
    assert said.ids_nbytes == (config.microbatch_size * 12 // 4 if chats else 0)
    assert torch.equal(sent, method.pack_forward(0 * ids_BW | flags_BW, state, MESSAGE_ID))
    arrived, _ = method.unpack_forward(sent, MESSAGE_ID)
    assert torch.equal(arrived, flags_BW)


def test_aqsgd_has_the_ids_in_its_messages_whoever_needs_them():
    """Both ends find a sample's state by its ids."""
    config = config_of(next(case for case in CASES if "aqsgd" in case.name), 2, "1F1B")
    model = HuggingFaceModelConfig(source="", stored={}, vocab_size=300, dim=32, n_layers=4, boundaries=(1, 2))
    method = boundary_method(model, config)
    assert method.shape.has_ids
    assert method.shape.labels_nbytes == message_sizes(model, config).labels_nbytes == 0


def test_every_compressor_and_format_has_a_length():
    assert MESSAGE_LAYOUTS.keys() == COMPRESSORS.keys()
    assert ROW_SIZES.keys() == FORMATS.keys()


def test_an_uncut_model_sends_nothing():
    config = config_of(CASES[0], 1, "1F1B")
    assert message_sizes(config.model.resolve(64), config) == MessageSizes(
        forward_nbytes=0, backward_nbytes=0, ids_nbytes=0
    )


def test_a_method_for_another_kind_of_model_is_refused():
    config = replace(config_of(CASES[0], 2, "1F1B"), boundary=BoundaryConfig(method="subspace"))
    with pytest.raises(UserError, match="is for a subspace model"):
        message_sizes(config.model.resolve(64), config)
