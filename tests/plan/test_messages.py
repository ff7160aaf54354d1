"""Lengths that plans count with, against those that methods state and against messages that are really encoded."""

from dataclasses import replace

import pytest
import torch

from tests.pipeline.cases import CASES, config_of
from thinpipe.boundary.contract import Crossing
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lengths import LAYOUTS, ROWS
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.boundary.settings import BoundarySection
from thinpipe.core.errors import UserError
from thinpipe.plan.messages import Messages, message_nbytes
from thinpipe.train.boundaries import boundary_method
from thinpipe.train.config import TrainingSection

CROSSING = Crossing(seed=0, step=0, microbatch=0, boundary=0)


@pytest.mark.parametrize("vocabulary", [64, 70_000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lengths_are_those_of_real_messages(case, vocabulary):
    """Every method, format, compressor and memory: the contract test sees to it that each has a case."""
    config = config_of(case, 2, "1F1B")
    sizes = replace(config.parallelism, pipeline_parallel_microbatch_size=2)
    config = replace(config, parallelism=sizes, training=TrainingSection(steps=9, global_batch_size=4, seq_len=11))
    model = config.model.resolve(vocabulary)
    said, method = message_nbytes(model, config), boundary_method(model, config)
    assert (said.forward_nbytes, said.backward_nbytes) == (method.forward_nbytes, method.backward_nbytes)
    assert said.ids_nbytes == method.shape.ids_nbytes

    state = torch.randn(2, 11, model.state_width, generator=torch.Generator().manual_seed(0))
    ids_BW = torch.arange(24).view(2, 12)
    sent = method.pack_forward(ids_BW, state, CROSSING)
    method.unpack_forward(sent, CROSSING)
    assert (sent.dtype, sent.numel()) == (torch.uint8, said.forward_nbytes)
    assert method.pack_backward(state, CROSSING).numel() == said.backward_nbytes


def test_every_compressor_and_format_has_a_length():
    assert LAYOUTS.keys() == COMPRESSORS.keys()
    assert ROWS.keys() == FORMATS.keys()


def test_an_uncut_model_sends_nothing():
    config = config_of(CASES[0], 1, "1F1B")
    assert message_nbytes(config.model.resolve(64), config) == Messages(
        forward_nbytes=0, backward_nbytes=0, ids_nbytes=0
    )


def test_a_method_for_another_kind_of_model_is_refused():
    config = replace(config_of(CASES[0], 2, "1F1B"), boundary=BoundarySection(method="subspace"))
    with pytest.raises(UserError, match="is for a subspace model"):
        message_nbytes(config.model.resolve(64), config)
