"""Codecs by name: stated bytes, what is decoded, settings that are refused."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import thinpipe
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.config.boundary import COMPRESSION_SETTINGS

SHAPE = (2, 8, 32)
SETTINGS = {"topk": {"keep": 0.25}, "quantise": {"bits": 4}, "lowrank": {"rank": 4}}


@pytest.fixture
def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "nbytes", "error"),
    [
        ("fp32", 16 * 128, 0.0),
        ("bf16", 16 * 64, 0.004),
        ("int8", 16 * 34, 0.01),
        ("int4", 16 * 18, 0.13),
        ("quantise", 2 * (4 + 128), 0.2),
        ("topk", 2 * (64 * 2 + 32), 0.7),
        ("lowrank", 16 * 4 * 2 + 4 * 32 * 2, 0.9),
    ],
)
def test_a_codec_has_the_bytes_it_states_and_decodes_what_it_encoded(values, name, nbytes, error):
    codec = thinpipe.codec(name, SHAPE, **SETTINGS.get(name, {}))
    data = codec.encode(values)
    assert (data.dtype, data.shape, codec.nbytes) == (torch.uint8, (nbytes,), nbytes)
    arrived = codec.decode(data)
    assert arrived.shape == values.shape
    relative = ((arrived - values).norm() / values.norm()).item()
    assert relative <= error
    assert relative > error / 4 or not error  # it is lossy, and not another codec


def test_stochastic_rounding_is_unbiased_and_repeatable(values):
    def mean(seed):
        sender, receiver = (thinpipe.codec("int4", SHAPE, stochastic=True, seed=seed) for _ in range(2))
        return torch.stack([receiver.decode(sender.encode(values)) for _ in range(200)]).mean(0)

    assert torch.equal(mean(0), mean(0))
    assert not torch.equal(mean(0), mean(1))
    nearest = thinpipe.codec("int4", SHAPE)
    assert (mean(0) - values).norm() < 0.3 * (nearest.decode(nearest.encode(values)) - values).norm()


def test_error_feedback_sends_the_rest_later(values):
    sender, receiver = (thinpipe.codec("topk", SHAPE, keep=0.25, feedback="ef21") for _ in range(2))
    arrived = [receiver.decode(sender.encode(values)) for _ in range(8)]
    assert (arrived[-1] - values).norm() < 0.05 * (arrived[0] - values).norm()


@pytest.mark.parametrize("name", ["int4", *SETTINGS])
def test_torchs_default_data_type_changes_nothing(values, name):
    settings = SETTINGS.get(name, {}) | ({"feedback": "ef21"} if name in SETTINGS else {})

    def arrived():
        codec = thinpipe.codec(name, SHAPE, stochastic=True, **settings)
        return [codec.decode(codec.encode(values)) for _ in range(2)]

    wanted = arrived()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = arrived()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))


def test_no_message_and_no_tensor_shares_memory_with_what_it_was_made_of(values):
    codec, before = thinpipe.codec("fp32", SHAPE), values.clone()
    message = codec.encode(values)
    arrived = codec.decode(message)
    values.zero_()
    message.copy_(torch.zeros_like(message))
    assert torch.equal(arrived, before)
    values.copy_(before)
    message = codec.encode(values)
    values.zero_()
    assert torch.equal(codec.decode(message), before)


def test_the_data_type_of_what_is_decoded(values):
    codec = thinpipe.codec("int8", SHAPE, dtype=torch.bfloat16)
    assert codec.decode(codec.encode(values.bfloat16())).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("three", {}, "there is no codec 'three': there are fp32, bf16, int8, int4, topk"),
        ("int4", {"keep": 0.1}, "the number format int4 has no settings: leave out keep"),
        ("quantize", {"bits": 4}, "there is no codec 'quantize': did you mean quantise? There are fp32, bf16"),
        ("INT4", {}, "did you mean int4?"),
        ("topk", {}, "codec 'topk': kind = \"topk\" needs keep"),
        ("topk", {"keep": 2.0}, "codec 'topk': keep must lie between 0 and 1"),
        ("topk", {"kep": 0.1}, "codec 'topk': unknown key kep: did you mean keep?"),
        ("topk", {"keep": 0.1, "kind": "lowrank"}, "leave kind out"),
        ("quantise", {"bits": "4"}, "codec 'quantise': bits: expected int | null, got str"),
        ("topk", {"keep": 0.1, "feedback": "aqsgd"}, "token ids"),
    ],
)
def test_a_wrong_codec_is_refused(name, settings, message):
    with pytest.raises(thinpipe.UserError) as refused:
        thinpipe.codec(name, SHAPE, **settings)
    assert message in str(refused.value)


@pytest.mark.parametrize("shape", [(16, 64), (4.0, 16, 64), (4, 0, 64), None])
def test_a_shape_that_no_message_has_is_refused(shape):
    with pytest.raises(thinpipe.UserError, match=r"write three whole numbers from 1, \(samples, tokens, width\)"):
        thinpipe.codec("int4", shape)


@pytest.mark.parametrize("dtype", ["bf16", torch.int8])
def test_a_data_type_that_is_not_of_floating_point_is_refused(dtype):
    with pytest.raises(thinpipe.UserError, match=r"write a floating-point type of torch, as torch.bfloat16"):
        thinpipe.codec("int4", SHAPE, dtype=dtype)


def test_numbers_of_numpy_are_numbers():
    shape = torch.zeros(SHAPE).shape
    codec = thinpipe.codec("topk", shape, keep=np.float64(0.25), feedback="ef", seed=np.int64(3))
    thinpipe.codec("topk", np.array(SHAPE), keep=0.25, feedback="ef", seed=3).load_codec_state(codec.codec_state())
    with pytest.raises(thinpipe.UserError, match="seed is 'a': write a whole number"):
        thinpipe.codec("int4", SHAPE, seed="a")


def test_what_is_no_tensor_is_refused(values):
    codec = thinpipe.codec("int8", SHAPE)
    with pytest.raises(TypeError, match="encode takes a tensor of torch, and got ndarray"):
        codec.encode(values.numpy())
    data = bytes(codec.encode(values).tolist())
    with pytest.raises(TypeError, match=r"got bytes: of bytes, torch.frombuffer\(bytearray\(data\)"):
        codec.decode(data)
    assert torch.equal(
        codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)), codec.decode(codec.encode(values))
    )


def test_a_codec_prints_what_it_is():
    text = repr(thinpipe.codec("topk", SHAPE, keep=0.25))
    assert text.startswith("Codec('topk', shape=[2, 8, 32], ")
    assert text.endswith("keep=0.25, nbytes=320)")


@pytest.mark.parametrize(("name", "feedback"), [("topk", "ef"), ("topk", "ef21"), ("int4", None)])
def test_codec_state_goes_on_where_it_was(values, name, feedback, tmp_path):
    settings = SETTINGS.get(name, {}) | ({"feedback": feedback} if feedback else {})

    def ends():
        return [thinpipe.codec(name, SHAPE, stochastic=True, **settings) for _ in range(2)]

    def send(sender, receiver, count):
        return [receiver.decode(sender.encode(values * (1 + index))) for index in range(count)]

    before, after, without = ends(), ends(), ends()
    send(*before, 3)
    for end, (codec, resumed) in enumerate(zip(before, after, strict=True)):
        save_file(codec.codec_state(), tmp_path / f"{end}.safetensors")
        resumed.load_codec_state(load_file(tmp_path / f"{end}.safetensors"))
    wanted = send(*before, 2)
    assert all(map(torch.equal, send(*after, 2), wanted))
    assert not all(map(torch.equal, send(*without, 2), wanted))


def test_codec_state_of_another_codec_is_refused_and_changes_nothing(values):
    codec = thinpipe.codec("topk", SHAPE, keep=0.25, feedback="ef")
    codec.encode(values)
    before = {name: tensor.tolist() for name, tensor in codec.codec_state().items()}
    for other, message in (
        (thinpipe.codec("topk", SHAPE, keep=0.5, feedback="ef"), r"\(saved -> here\): keep 0.5 -> 0.25"),
        (thinpipe.codec("topk", (1, 8, 32), keep=0.25, feedback="ef"), r"shape \[1, 8, 32\] -> \[2, 8, 32\]"),
        (thinpipe.codec("int4", SHAPE), "it has settings, encoded"),
    ):
        with pytest.raises(thinpipe.UserError, match=message):
            codec.load_codec_state(other.codec_state())
    for state in ({}, codec.codec_state() | {"settings": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(thinpipe.UserError, match=r"it has nothing|no settings of a boundary"):
            codec.load_codec_state(state)
    assert {name: tensor.tolist() for name, tensor in codec.codec_state().items()} == before


def test_other_shapes_and_lengths_are_refused(values):
    codec = thinpipe.codec("int8", SHAPE)
    with pytest.raises(ValueError, match=r"a tensor of \(1, 8, 32\) for a codec of \(2, 8, 32\)"):
        codec.encode(values[:1])
    with pytest.raises(ValueError, match=r"for a codec of 544 bytes"):
        codec.decode(codec.encode(values)[1:])


@pytest.fixture
def registry():
    """Forgets at the end what the test has registered."""
    before = [(table, dict(table)) for table in (COMPRESSORS, COMPRESSION_SETTINGS)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


class Halves(thinpipe.Compressor):
    """float16, of which `encode` or `decode` may make something else."""

    def __init__(self, shape, _settings, _seed, encoded=slice(None), decoded=slice(None)):
        self.shape, self.encoded, self.decoded, self.nbytes = shape, encoded, decoded, shape.rows * shape.width * 2

    def encode(self, values_BTW, _context):
        return values_BTW.half().flatten().view(torch.uint8)[self.encoded]

    def decode(self, data, _context):
        return data.view(torch.float16).float().view(SHAPE)[self.decoded]


@pytest.mark.usefixtures("registry")
def test_a_compressor_that_does_not_do_what_it_states_is_named(values):
    for name, wrong in (("halves", {}), ("short", {"encoded": slice(9)}), ("fewer", {"decoded": slice(1)})):
        thinpipe.register_compressor(name, partial(Halves, **wrong))
    codec = thinpipe.codec("halves", SHAPE)
    assert torch.equal(codec.decode(codec.encode(values)), values.half().float())
    with pytest.raises(ValueError, match=r"^Codec\('short', .* encoded a tensor as \(9,\) torch.uint8: its compressor"):
        thinpipe.codec("short", SHAPE).encode(values)
    with pytest.raises(ValueError, match=r"^Codec\('fewer', .* to \(1, 8, 32\), not \(2, 8, 32\): its compressor"):
        thinpipe.codec("fewer", SHAPE).decode(codec.encode(values))


@pytest.mark.usefixtures("registry")
def test_what_cannot_be_registered_is_refused_and_a_class_that_is_defined_anew_is_not():
    def define():
        return type("Anew", (Halves,), {"__module__": "notebook", "__qualname__": "Anew"})

    for _ in range(2):
        thinpipe.register_compressor("anew", define())
        thinpipe.register_compressor("fewer", partial(define(), encoded=slice(9)))
    with pytest.raises(thinpipe.UserError, match="already a compressor named 'anew'"):
        thinpipe.register_compressor("anew", Halves)
    with pytest.raises(thinpipe.UserError, match="levels: no field of CompressionConfig"):
        thinpipe.register_compressor("with-levels", Halves, ("bits", "levels"))
    with pytest.raises(thinpipe.UserError, match="3 makes no compressor: write the class"):
        thinpipe.register_compressor("three", 3)


class Taken(thinpipe.Compressor):
    """A compressor that nobody makes."""


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(thinpipe.UserError, match="already a compressor named 'topk'"):
        thinpipe.register_compressor("topk", Taken)
    with pytest.raises(thinpipe.UserError, match="already a compressor named 'int4'"):
        thinpipe.register_compressor("int4", Taken)
