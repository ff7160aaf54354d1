"""Top-k, quantisation and low rank: exact lengths, known errors, nothing lost that should be there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.boundary.contract import MessageContext, MessageId, MessageShape
from thinpipe.boundary.formats import FORMATS, round_up_to_bf16
from thinpipe.boundary.lowrank import LowRank, truncate
from thinpipe.boundary.packing import pack_bits, unpack_bits
from thinpipe.boundary.quantise import Quantise
from thinpipe.boundary.registry import COMPRESSORS, FEEDBACKS, make_method
from thinpipe.boundary.sizes import packed_nbytes
from thinpipe.boundary.topk import TopK
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.core.errors import UserError

SHAPE = MessageShape(batch=3, tokens=7, width=10, vocab_size=300, dtype=torch.float32)
NEAREST = MessageContext(training=True)
COMPRESSION_SETTINGS = [
    CompressionConfig(kind="topk", keep=0.1),
    CompressionConfig(kind="topk", keep=0.5, per="token", format="fp32"),
    CompressionConfig(kind="topk", keep=0.01, format="int8"),
    *(CompressionConfig(kind="quantise", bits=bits) for bits in range(2, 9)),
    CompressionConfig(kind="quantise", bits=3, per="token"),
    CompressionConfig(kind="quantise", bits=5, tile=16, rotate=True),
    CompressionConfig(kind="quantise", bits=8, per="token", rotate=True, whole_channels=2, whole_tokens=1),
    CompressionConfig(kind="quantise", bits=3, tile=7, whole_channels=3),
    CompressionConfig(kind="quantise", bits=4, whole_tokens=2),
    CompressionConfig(kind="lowrank", rank=2),
    CompressionConfig(kind="lowrank", rank=3, format="int8"),
]


def label(compression):
    return "-".join(str(value) for value in vars(compression).values() if value not in (None, False, "none"))


def values(seed=0, shape=SHAPE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.batch, shape.tokens, shape.width, generator=generator)


def there_and_back(compressor, sent, context=NEAREST):
    data = compressor.encode(sent, context)
    assert (data.dtype, data.shape) == (torch.uint8, (compressor.nbytes,))
    back = compressor.decode(data, context)
    assert (back.dtype, back.shape) == (torch.float32, sent.shape)
    return back


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 4), count=st.integers(0, 40), bits=st.integers(0, 27), seed=st.integers(0, 99))
def test_bits_are_packed_without_gaps_and_come_back(rows, count, bits, seed):
    integers = torch.randint(1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack_bits(integers, bits)
    assert (packed.dtype, packed.shape) == (torch.uint8, (rows, -(-count * bits // 8)))
    assert packed_nbytes(count, bits) == packed.shape[1]
    assert torch.equal(unpack_bits(packed, count, bits), integers)


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("count", [1, 2, 7, 8, 13])
def test_a_row_of_short_integers_is_one_little_endian_number(bits, count):
    integers = torch.randint(1 << bits, (3, count))
    for row, packed in zip(integers.tolist(), pack_bits(integers, bits), strict=True):
        number = sum(integer << bits * place for place, integer in enumerate(row))
        assert bytes(packed.tolist()) == number.to_bytes(packed_nbytes(count, bits), "little")


def test_rounding_up_to_bfloat16_is_tight_on_both_sides_of_zero():
    numbers = torch.cat((torch.randn(10_000), torch.tensor([0.0, -1.0, 1.0, 1e-41, -1e-41])))
    rounded = round_up_to_bf16(numbers).float()
    assert (rounded >= numbers).all()
    assert (rounded - numbers <= numbers.abs() * 2**-7 + 1e-40).all()


@pytest.mark.parametrize("compression", COMPRESSION_SETTINGS, ids=label)
@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_message_has_the_length_its_method_states(compression, feedback, dtype):
    states = replace(compression, feedback=feedback)
    gradients = compression if feedback == "aqsgd" else states
    shape = replace(SHAPE, dtype=dtype)
    for in_subspace in (True, False):
        method = make_method(BoundaryConfig(states=states, gradients=gradients), shape, in_subspace=in_subspace, seed=1)
        ids, state = torch.randint(300, (3, 8)), values().to(dtype)
        message_id = MessageId(seed=1, step=0, microbatch=0, boundary=0)
        message = method.pack_forward(ids, state, message_id)
        assert message.shape == (method.forward_nbytes,)
        got_ids, got = method.unpack_forward(message, message_id)
        assert torch.equal(got_ids, ids)
        assert (got.shape, got.dtype) == (state.shape, dtype)
        gradient = method.pack_backward(state, message_id)
        assert gradient.shape == (method.backward_nbytes,)
        assert method.unpack_backward(gradient, message_id).dtype == dtype


def test_stated_lengths_by_hand():
    def nbytes(**compression):
        return COMPRESSORS[compression["kind"]](SHAPE, CompressionConfig(**compression), 0).nbytes

    assert nbytes(kind="topk", keep=0.1) == 3 * (7 * 2 + 7)  # 7 of 70 in bf16; positions of 7 bits
    assert nbytes(kind="topk", keep=0.5) == 3 * (35 * 2 + 9)  # 35 of 70; a bit for each of the 70 is shorter
    assert nbytes(kind="topk", keep=0.2, per="token", format="fp32") == 21 * (2 * 4 + 1)
    assert nbytes(kind="quantise", bits=3) == 3 * 4 + -(-210 * 3 // 8)
    assert nbytes(kind="quantise", bits=4, tile=16) == 3 * 5 * 4 + 105
    whole = 3 * 2 * 10 * 2 + 3 * 5 * 3 * 2 + 2  # two tokens; three channels of the others; three positions of 4 bits
    assert nbytes(kind="quantise", bits=4, per="token", whole_channels=3, whole_tokens=2) == whole + 3 * 5 * (4 + 5)
    assert nbytes(kind="lowrank", rank=2) == (21 + 10) * 2 * 2


@pytest.mark.parametrize(("per", "groups"), [("sample", 3), ("token", 21)])
@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_topk_keeps_the_largest_and_zeroes_the_rest(per, groups, keep):
    sent = values()
    topk = TopK(SHAPE, CompressionConfig(kind="topk", keep=keep, per=per, format="fp32"), 0)
    back = there_and_back(topk, sent)
    for was, now in zip(sent.view(groups, -1), back.view(groups, -1), strict=True):
        count = round(keep * len(was))
        least = was.abs().sort(descending=True).values[count - 1]
        assert torch.equal(now, torch.where(was.abs() >= least, was, 0.0))


def test_positions_are_the_same_as_integers_and_as_a_bitmap():
    topk = TopK(SHAPE, CompressionConfig(kind="topk", keep=0.3), 0)
    assert topk.as_bitmap
    data = topk.encode(values(), NEAREST)
    kept = topk.kept_indices(data)
    topk.as_bitmap = False
    assert torch.equal(topk.kept_indices(topk.encode(values(), NEAREST)), kept)
    topk.as_bitmap = True
    with pytest.raises(ValueError, match="0 positions for 63 numbers"):
        topk.kept_indices(torch.zeros_like(data))


def test_a_reused_mask_sends_kept_values_back_without_positions():
    settings = BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.1),
        gradients=CompressionConfig(kind="topk", reuse_mask=True, format="fp32"),
    )
    method = make_method(settings, SHAPE, in_subspace=False, seed=0)
    assert method.backward_nbytes == 3 * 7 * 4
    ids, message_ids = torch.zeros(3, 8, dtype=torch.int64), []
    states = []
    for microbatch in range(3):  # all forward before any comes back, as in GPipe
        message_ids.append(MessageId(seed=1, step=0, microbatch=microbatch, boundary=0))
        message = method.pack_forward(ids, values(microbatch), message_ids[-1])
        states.append(method.unpack_forward(message, message_ids[-1])[1])
    validation = replace(message_ids[0], training=False)
    method.unpack_forward(method.pack_forward(ids, values(9), validation), validation)
    for message_id, state in zip(message_ids, states, strict=True):
        gradient = values(50 + message_id.microbatch)
        back = method.unpack_backward(method.pack_backward(gradient, message_id), message_id)
        assert torch.equal(back, torch.where(state != 0, gradient, 0.0))
    assert not method.sent
    assert not method.received


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("where", [{}, {"per": "token"}, {"tile": 16}])
def test_quantised_numbers_come_back_within_half_a_step(bits, where):
    sent = values() * 3 + 5
    quantise = Quantise(SHAPE, CompressionConfig(kind="quantise", bits=bits, **where), 0)
    back = there_and_back(quantise, sent)
    for was, now in zip(quantise._tiles(sent.flatten(1)), quantise._tiles(back.flatten(1)), strict=True):
        step = (was.amax(1) - was.amin(1)) / (2**bits - 1)
        slack = was.abs().amax(1) * 2**-7  # the range is rounded outwards to bfloat16
        assert ((now - was).abs().amax(1) <= (step + slack / (2**bits - 1) + step * 2**-7) / 2 + 1e-5).all()


@pytest.mark.parametrize("middle", [0.0, 5.0, -5.0])
def test_every_number_lies_in_the_range_that_is_sent(middle):
    """Or rounding at random would have the wrong mean at its ends."""
    sent = values() + middle
    data = Quantise(SHAPE, CompressionConfig(kind="quantise", bits=4, tile=14), 0).encode(sent, NEAREST)
    least, step = data[: 15 * 2 * 2].view(torch.bfloat16).double().view(15, 2).unbind(1)
    tiles = sent.double().view(15, 14)
    assert (least <= tiles.amin(1)).all()
    assert (least + 15 * step >= tiles.amax(1) - 1e-6).all()


def test_quantisation_by_hand_in_float64():
    """2 bits: the three steps of the paper's uniform quantiser between min and max."""
    shape = replace(SHAPE, batch=1, tokens=1, width=7)
    sent = torch.tensor([[[-1.0, -0.8, -0.3, 0.1, 0.4, 1.5, 2.0]]])
    back = there_and_back(Quantise(shape, CompressionConfig(kind="quantise", bits=2), 0), sent)
    least, largest = -1.0, 2.0
    wanted = np.round((sent.double().numpy() - least) / (largest - least) * 3) / 3 * (largest - least) + least
    assert np.array_equal(back.double().numpy(), wanted)


@pytest.mark.parametrize("constant", [0.0, 3.0, -1e-3])
def test_a_constant_comes_back(constant):
    back = there_and_back(
        Quantise(SHAPE, CompressionConfig(kind="quantise", bits=2), 0), torch.full((3, 7, 10), constant)
    )
    torch.testing.assert_close(back, torch.full((3, 7, 10), constant), rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "compression",
    [CompressionConfig(kind="quantise", bits=2), CompressionConfig(kind="topk", keep=0.5, format="int4")],
    ids=label,
)
def test_gradients_are_rounded_at_random_with_the_right_mean(compression):
    """And states are not: they come back the same every time."""
    method = make_method(BoundaryConfig(states=compression, gradients=compression), SHAPE, in_subspace=True, seed=0)
    gradient, ids = values(), torch.zeros(3, 8, dtype=torch.int64)
    message_ids = [MessageId(seed=1, step=step, microbatch=0, boundary=0) for step in range(2000)]
    backs = [
        method.unpack_backward(method.pack_backward(gradient, message_id), message_id) for message_id in message_ids
    ]
    kept = backs[0].new_tensor(0) + torch.stack(backs).abs().amax(0) > 0
    step = 6 / (3 if compression.kind == "quantise" else 7)
    error = torch.stack(backs).double().mean(0) - gradient
    assert float(error[kept].abs().max()) < 5 * step / 2000**0.5
    assert float((backs[0] - gradient)[kept].abs().max()) > step / 4
    states = [method.pack_forward(ids, gradient, message_id) for message_id in message_ids[:2]]
    assert torch.equal(states[0], states[1])


def test_rotation_helps_where_a_few_numbers_are_large():
    shape = replace(SHAPE, width=64)
    sent = values(shape=shape)
    sent[:, :, 5] += 50
    errors = [
        float((there_and_back(Quantise(shape, compression, 1), sent) - sent).square().mean())
        for compression in (
            CompressionConfig(kind="quantise", bits=4, tile=64),
            CompressionConfig(kind="quantise", bits=4, tile=64, rotate=True),
        )
    ]
    assert errors[1] < errors[0] / 3


def test_low_rank_is_the_best_approximation_of_numpy():
    sent = values()
    back = there_and_back(LowRank(SHAPE, CompressionConfig(kind="lowrank", rank=3, format="fp32"), 0), sent)
    left, strengths, right = np.linalg.svd(sent.view(21, 10).double().numpy(), full_matrices=False)
    best = left[:, :3] * strengths[:3] @ right[:3]
    np.testing.assert_allclose(back.view(21, 10).numpy(), best, atol=1e-5)
    _, right_RW = truncate(sent.view(21, 10), 3)
    assert (right_RW.gather(1, right_RW.abs().argmax(1, keepdim=True)) > 0).all()


def test_a_rank_without_effect_is_refused():
    with pytest.raises(UserError, match="a rank of 10 is no less than that of 21 tokens of 10 numbers"):
        LowRank(SHAPE, CompressionConfig(kind="lowrank", rank=10), 0)


@pytest.mark.parametrize("compression", COMPRESSION_SETTINGS, ids=label)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_as_such(compression, bad):
    """So that the step is skipped, wherever its loss is."""
    sent = values()
    sent[1, 2, 3] = bad
    back = there_and_back(COMPRESSORS[compression.kind](SHAPE, compression, 0), sent)
    assert not back.isfinite().all()


@pytest.mark.parametrize("compression", COMPRESSION_SETTINGS, ids=label)
def test_more_bytes_bring_less_error_and_none_brings_more_than_zeros(compression):
    sent = values()
    back = there_and_back(COMPRESSORS[compression.kind](SHAPE, compression, 0), sent)
    assert float((back - sent).norm()) < float(sent.norm())
    richer = {
        "topk": lambda: replace(compression, keep=min(0.9, compression.keep * 3)),
        "quantise": lambda: replace(compression, bits=min(8, compression.bits + 1)),
        "lowrank": lambda: replace(compression, rank=compression.rank + 2),
    }[compression.kind]()
    if richer != compression:
        better = there_and_back(COMPRESSORS[compression.kind](SHAPE, richer, 0), sent)
        assert float((better - sent).norm()) < float((back - sent).norm())


def test_every_format_serves_topk_and_low_rank():
    for name in FORMATS:
        for compression in (
            CompressionConfig(kind="topk", keep=0.2, format=name),
            CompressionConfig(kind="lowrank", rank=2, format=name),
        ):
            there_and_back(COMPRESSORS[compression.kind](SHAPE, compression, 0), values())
