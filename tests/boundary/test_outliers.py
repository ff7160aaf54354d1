"""Outliers that are sent whole: they come back as bfloat16, spoil nothing else, and are chosen alike everywhere."""

from dataclasses import replace

import pytest
import torch

from tests.boundary.test_compressors import NEAREST, SHAPE, there_and_back, values
from thinpipe.boundary.contract import MessageId, MessageShape
from thinpipe.boundary.outliers import WholeOutliers, largest_channels, make_quantise
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.sizes import MessageSize, forward_nbytes
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.core.errors import UserError

ROTATED = CompressionConfig(kind="quantise", bits=8, per="token", rotate=True)
WHOLE = replace(ROTATED, whole_channels=2, whole_tokens=1)
WIDE = MessageShape(batch=2, tokens=16, width=256, vocab_size=300, dtype=torch.float32)
GIANTS = [7, 200]


def like_published(shape=WIDE):
    """Two channels 60 times as large as the others, and a first token in which they are 1200 times as large."""
    sent = values(shape=shape)
    sent[:, :, GIANTS] *= 60
    sent[:, 0, GIANTS] *= 20
    return sent


def error(back, sent, tokens):
    """Of ordinary channels, relative to their values."""
    ordinary = [channel for channel in range(WIDE.width) if channel not in GIANTS]
    was, now = sent[:, tokens][..., ordinary], back[:, tokens][..., ordinary]
    return float((now - was).norm() / was.norm())


def test_whole_values_are_the_values_in_bfloat16():
    sent = like_published()
    back = there_and_back(make_quantise(WIDE, WHOLE, 0), sent)
    rounded = sent.to(torch.bfloat16).float()
    assert torch.equal(back[:, 0], rounded[:, 0])
    assert torch.equal(back[..., GIANTS], rounded[..., GIANTS])
    others = [channel for channel in range(WIDE.width) if channel not in GIANTS]
    assert not torch.equal(back[:, 1:, others], rounded[:, 1:, others])


def test_outliers_cost_the_others_nothing():
    """The rest is what it would be if there were no outliers at all."""
    sent = like_published()
    calm = sent.index_fill(2, torch.tensor(GIANTS), 0.0)[:, 1:]
    alone = there_and_back(make_quantise(replace(WIDE, tokens=15), ROTATED, 0), calm)
    back = there_and_back(make_quantise(WIDE, WHOLE, 0), sent)
    ordinary = [channel for channel in range(WIDE.width) if channel not in GIANTS]
    assert torch.equal(back[:, 1:, ordinary], alone[..., ordinary])
    spoilt = there_and_back(make_quantise(WIDE, ROTATED, 0), sent)
    rest, first = slice(1, None), slice(1)
    assert error(back, sent, rest) < 0.011 < 0.018 < error(spoilt, sent, rest)
    assert error(back, sent, first) < 0.003 < 0.2 < error(spoilt, sent, first)


def test_equal_magnitudes_are_told_apart_by_position():
    level = torch.ones(2, 3, 8)
    level[1, 2, 5] = -1.5
    assert largest_channels(level, 4).tolist() == [0, 1, 2, 5]
    assert largest_channels(torch.zeros(1, 1, 8), 3).tolist() == [0, 1, 2]
    level[0, 0, 7] = torch.nan
    assert largest_channels(level, 2).tolist() == [5, 7]
    assert largest_channels(level, 0).tolist() == []


def test_one_large_value_in_one_sample_makes_a_channel_whole():
    sent = values(shape=WIDE)
    sent[1, 9, 33] = 1e4
    back = there_and_back(make_quantise(WIDE, replace(ROTATED, whole_channels=1), 0), sent)
    assert torch.equal(back[..., 33], sent.to(torch.bfloat16).float()[..., 33])


@pytest.mark.parametrize("positions", [[200, 7], [7, 7], [255, 256], [511, 511]])
def test_positions_that_no_encoder_sends_arrive_as_values_that_are_not_finite(positions):
    """Beyond the width, twice, or out of order: the sender is named as for any message that is not finite."""
    shape = replace(WIDE, width=257)  # nine bits can say more than there are channels
    outliers = WholeOutliers(shape, WHOLE, 0)
    sent = values(shape=shape)
    data = outliers.encode(sent, NEAREST)
    low, high = [position & 255 for position in positions], [position >> 8 for position in positions]
    packed = torch.tensor([*low, high[0] | high[1] << 1], dtype=torch.uint8)
    assert len(packed) == outliers.layout.positions_nbytes
    data[-len(packed) :] = packed
    back = outliers.decode(data, NEAREST)
    assert back.isfinite().all() == (positions == [255, 256])


def test_any_bytes_are_decoded_to_a_tensor():
    method = make_method(BoundaryConfig(states=WHOLE, gradients=WHOLE), WIDE, in_subspace=False, seed=0)
    message_id = MessageId(seed=0, step=0, microbatch=0, boundary=0)
    generator = torch.Generator().manual_seed(0)
    for nbytes, unpack in (
        (method.forward_nbytes, lambda data: method.unpack_forward(data, message_id)[1]),
        (method.backward_nbytes, lambda data: method.unpack_backward(data, message_id)),
    ):
        for _ in range(50):
            data = torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)
            assert unpack(data).shape == (2, 16, 256)
        assert not unpack(torch.full((nbytes,), 255, dtype=torch.uint8)).isfinite().all()  # 0xffff is NaN
        with pytest.raises(ValueError, match="bytes were stated"):
            unpack(torch.zeros(nbytes - 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whole_tokens": 7}, "7 whole tokens of 7 leave nothing to quantise: lower whole_tokens"),
        ({"whole_channels": 11}, "11 whole channels of 10 leave nothing to quantise: lower whole_channels"),
    ],
)
def test_nothing_left_to_quantise_is_refused_by_codec_and_plan(settings, message):
    compression = replace(ROTATED, **settings)
    with pytest.raises(UserError, match=message):
        make_quantise(SHAPE, compression, 0)
    size = MessageSize(batch=3, tokens=7, width=10, vocab_size=300)
    with pytest.raises(UserError, match=message):
        forward_nbytes(BoundaryConfig(states=compression), size)
