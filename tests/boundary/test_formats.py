"""Number formats, rotation and packed ids: exact lengths, known errors, the same bits everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.boundary.contract import MessageId, MessageShape
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.packing import pack_flagged_ids, pack_ids, unpack_flagged_ids, unpack_ids
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.rotation import HadamardRotation
from thinpipe.boundary.sizes import id_bits, id_nbytes
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.errors import UserError
from thinpipe.core.token_flags import BEGINS, TRAINED
from thinpipe.device.counter_random import uniform

MESSAGE_ID = MessageId(seed=1, step=2, microbatch=3, boundary=0)


def rows(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) * torch.logspace(-3, 3, count)[:, None]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 9), width=st.integers(1, 41), seed=st.integers(0, 99))
def test_encoded_rows_have_the_stated_length_and_come_back(name, count, width, seed):
    number_format, values = FORMATS[name], rows(count, width, seed)
    encoded = number_format.encode(values)
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (count, number_format.row_nbytes(width)))
    decoded = number_format.decode(encoded, width)
    assert decoded.dtype == torch.float32
    if number_format.lossless:
        assert torch.equal(decoded, values)
    largest = values.abs().amax(1, keepdim=True)
    limit = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127 * 1.01, "int4": 0.51 / 7 * 1.01}[name]
    assert ((decoded - values).abs() <= limit * largest).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_stay_zero_and_signs_survive(name):
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.5], [-3e-30, 3e-30, 0.0]])
    decoded = FORMATS[name].decode(FORMATS[name].encode(values), 3)
    assert torch.equal(decoded[0], values[0])
    assert torch.equal(decoded[1].sign(), values[1].sign())
    assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_at_random_has_the_right_mean(name):
    values = torch.linspace(-1, 1, 64).repeat(4000, 1)
    encoded = FORMATS[name].encode(values, lambda like: uniform(like, 0))
    decoded = FORMATS[name].decode(encoded, 64)
    step = float(values.max()) / FORMATS[name].largest
    assert float((decoded.mean(0) - values[0]).abs().max()) < 5 * step / 4000**0.5
    assert float((decoded - values).abs().max()) <= step * 1.02


@pytest.mark.parametrize("width", [1, 2, 40, 64, 768])
def test_rotation_is_orthogonal_and_is_undone(width):
    rotation = HadamardRotation(width, seed=3)
    values = rows(5, width).double()
    turned = rotation.apply(values)
    torch.testing.assert_close(turned.norm(dim=1), values.norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(rotation.inverse(turned), values, rtol=1e-12, atol=1e-12)


def test_rotation_saves_the_small_entries_from_a_large_one():
    values = torch.randn(100, 256)
    values[:, 7] = 100.0
    errors = []
    for rotation in (None, HadamardRotation(256, seed=1)):
        turned = values if rotation is None else rotation.apply(values)
        decoded = FORMATS["int4"].decode(FORMATS["int4"].encode(turned), 256)
        back = decoded if rotation is None else rotation.inverse(decoded)
        small = torch.ones(256, dtype=torch.bool)
        small[7] = False
        errors.append(float((back - values)[:, small].square().mean()))
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize(
    ("vocabulary", "nbytes"), [(256, 2), (65_536, 2), (65_537, 3), (128_256, 3), (1 << 24, 3), ((1 << 24) + 1, 4)]
)
def test_ids_are_packed_in_16_24_or_32_bits(vocabulary, nbytes):
    ids = torch.tensor([[0, 1, vocabulary - 1], [2, vocabulary // 2, vocabulary - 2]])
    packed = pack_ids(ids, vocabulary)
    assert id_nbytes(vocabulary) == nbytes
    assert packed.shape == (6 * nbytes,)
    assert torch.equal(unpack_ids(packed, (2, 3), vocabulary), ids)


@pytest.mark.parametrize(
    ("vocabulary", "bits"),
    [(64, 16), (1 << 14, 16), (32_000, 17), (50_257, 18), (65_537, 24), (151_936, 24), (1 << 23, 25)],
)
def test_ids_with_flags_take_two_more_bits_at_most(vocabulary, bits):
    ids = torch.tensor([[0, 1, vocabulary - 1], [2, vocabulary // 2, vocabulary - 2]])
    for flags in (0, TRAINED, BEGINS, TRAINED | BEGINS):
        flagged = ids | torch.tensor([[flags, 0, flags], [BEGINS, flags, TRAINED]])
        packed = pack_flagged_ids(flagged, vocabulary)
        assert id_bits(vocabulary, has_flags=True) == bits
        assert packed.shape == (-(-6 * bits // 8),)
        assert torch.equal(unpack_flagged_ids(packed, (2, 3), vocabulary), flagged)


def test_a_message_with_flags_has_the_length_its_method_states():
    shape = MessageShape(batch=2, tokens=5, width=7, vocab_size=50_257, dtype=torch.float32, has_flags=True)
    method = make_method(BoundaryConfig(), shape, in_subspace=False, seed=1)
    ids = torch.randint(50_257, (2, 6)) | torch.tensor([[BEGINS, 0, 0, TRAINED, TRAINED, BEGINS]])
    message = method.pack_forward(ids, torch.randn(2, 5, 7), MESSAGE_ID)
    assert message.shape == (method.forward_nbytes,) == (12 * 18 // 8 + 10 * FORMATS["fp32"].row_nbytes(7),)
    assert torch.equal(method.unpack_forward(message, MESSAGE_ID)[0], ids)


@pytest.mark.parametrize("forward", FORMATS)
@pytest.mark.parametrize("backward", FORMATS)
@pytest.mark.parametrize("in_subspace", [True, False])
def test_a_message_has_the_length_its_method_states_and_repeats(forward, backward, in_subspace):
    shape = MessageShape(batch=2, tokens=5, width=7, vocab_size=100_000, dtype=torch.float32)
    method = make_method(BoundaryConfig(forward=forward, backward=backward), shape, in_subspace=in_subspace, seed=1)
    ids, state = torch.randint(100_000, (2, 6)), torch.randn(2, 5, 7)
    message = method.pack_forward(ids, state, MESSAGE_ID)
    assert message.shape == (method.forward_nbytes,)
    assert method.forward_nbytes == 12 * 3 + 10 * FORMATS[forward].row_nbytes(7)
    got_ids, got = method.unpack_forward(message, MESSAGE_ID)
    assert torch.equal(got_ids, ids)
    assert (got.shape, got.dtype) == (state.shape, state.dtype)
    gradient = method.pack_backward(state, MESSAGE_ID)
    assert gradient.shape == (method.backward_nbytes,)
    assert torch.equal(gradient, method.pack_backward(state, MESSAGE_ID))
    if forward == backward == "fp32":
        assert torch.equal(got, state)
        assert torch.equal(method.unpack_backward(gradient, MESSAGE_ID), state)
    with pytest.raises(ValueError, match="bytes were stated"):
        method.unpack_forward(message[:-1], MESSAGE_ID)


def test_random_rounding_depends_on_every_field_of_the_message_id():
    shape = MessageShape(batch=2, tokens=50, width=7, vocab_size=100, dtype=torch.float32)
    method = make_method(BoundaryConfig(backward="int4"), shape, in_subspace=True, seed=1)
    gradient = torch.randn(2, 50, 7)
    message_ids = [MESSAGE_ID, *(MessageId(**{**vars(MESSAGE_ID), name: 9}) for name in vars(MESSAGE_ID))]
    assert len({method.pack_backward(gradient, message_id).numpy().tobytes() for message_id in message_ids}) == 5


@pytest.mark.parametrize(("method", "in_subspace"), [("none", True), ("subspace", False)])
def test_a_method_that_does_not_fit_the_model_is_refused(method, in_subspace):
    shape = MessageShape(batch=1, tokens=1, width=1, vocab_size=2, dtype=torch.float32)
    with pytest.raises(UserError, match=r"leave boundary.method out"):
        make_method(BoundaryConfig(method=method), shape, in_subspace=in_subspace, seed=0)
