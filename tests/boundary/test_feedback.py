"""Error feedback, EF21 and AQ-SGD: their identities, both ends equal, nothing learnt from validation."""

from dataclasses import replace

import pytest
import torch

from thinpipe.boundary.contract import MessageId, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.row_store import RowStore
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.core.errors import UserError

SHAPE = MessageShape(batch=2, tokens=5, width=8, vocab_size=300, dtype=torch.float32)
COMPRESSIONS = [
    CompressionConfig(kind="topk", keep=0.1),
    CompressionConfig(kind="quantise", bits=2),
    CompressionConfig(kind="lowrank", rank=2),
]


def method_of(shape=SHAPE, **settings):
    return make_method(BoundaryConfig(**settings), shape, in_subspace=True, seed=0)


def message_id(step, *, training=True):
    return MessageId(seed=1, step=step, microbatch=0, boundary=0, training=training)


def values(seed, shape=SHAPE):
    return torch.randn(shape.batch, shape.tokens, shape.width, generator=torch.Generator().manual_seed(seed))


def ids_of(seed):
    return torch.randint(300, (2, 6), generator=torch.Generator().manual_seed(seed))


def forward(method, state, step, ids=None, *, training=True, receiver=None):
    """What arrives; in the same process, or in another with a method of its own."""
    message = method.pack_forward(ids_of(0) if ids is None else ids, state, message_id(step, training=training))
    return (receiver or method).unpack_forward(message, message_id(step, training=training))[1]


def backward(method, gradient, step, sender=None):
    message = method.pack_backward(gradient, message_id(step))
    return (sender or method).unpack_backward(message, message_id(step))


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda asked: asked.kind)
def test_what_error_feedback_sent_and_what_it_owes_is_the_truth(compression):
    settings = replace(compression, feedback="ef")
    method = method_of(states=settings, gradients=settings)
    for run, error in (
        (lambda step: forward(method, values(step), step), lambda: method.sender_state()["states.error_BTW"]),
        (lambda step: backward(method, values(step), step), lambda: method.receiver_state()["gradients.error_BTW"]),
    ):
        sent = sum(run(step).double() for step in range(30))
        true = sum(values(step).double() for step in range(30))
        torch.testing.assert_close(sent + error().double(), true, rtol=0, atol=1e-4)
        assert float(error().abs().max()) > 0.01
    assert method.sender_state().keys() == {"states.error_BTW"}
    assert method.receiver_state().keys() == {"gradients.error_BTW"}


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda asked: asked.kind)
@pytest.mark.parametrize("feedback", ["ef21", "aqsgd"])
def test_both_ends_remember_the_same_after_fifty_messages(compression, feedback):
    """In one process, where both are here, and in two, where each end has a method of its own."""
    settings = {"states": replace(compression, feedback=feedback)}
    if feedback == "ef21":
        settings["gradients"] = settings["states"]
    alone, before, after = (method_of(**settings) for _ in range(3))
    for step in range(50):
        ids, state, gradient = ids_of(step % 7), values(step), values(1000 + step)
        here = forward(alone, state, step, ids), backward(alone, gradient, step)
        there = forward(before, state, step, ids, receiver=after), backward(after, gradient, step, sender=before)
        assert all(torch.equal(one, two) for one, two in zip(here, there, strict=True))
    assert same(alone.sender_state(), alone.receiver_state())
    assert same(alone.sender_state(), before.sender_state())
    assert same(alone.sender_state(), after.receiver_state())
    assert not any(tensor.count_nonzero() for tensor in after.sender_state().values())  # the other end's is elsewhere


def test_ef21_arrives_at_what_does_not_change():
    method = method_of(states=CompressionConfig(kind="topk", keep=0.1, feedback="ef21", format="fp32"))
    state = values(0)
    errors = [float((forward(method, state, step) - state).norm()) for step in range(12)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 < errors[5]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_aqsgd_comes_nearer_with_every_visit_of_a_sample(store, tmp_path):
    settings = {"store": tmp_path / "store"} if store == "disk" else {}
    method = method_of(states=CompressionConfig(kind="quantise", bits=2, feedback="aqsgd"), **settings)
    samples, visits = 40, 5
    errors = torch.zeros(visits, samples)
    for visit in range(visits):
        for sample in range(samples):
            step = visit * samples + sample
            drifted = values(sample) + 0.001 * visit
            arrived = forward(method, drifted, step, ids_of(sample))
            errors[visit, sample] = (arrived - drifted).norm()
    assert (errors[1] < errors[0] / 2).all()
    assert (errors[2] < errors[1] / 2).all()
    assert float(errors[-1].max()) < 0.05 * float(errors[0].min())
    assert len(method.states.sent.row_of_key) == 2 * samples
    if store == "disk":
        assert list((tmp_path / "store").iterdir()) == []  # nothing that could be left behind


def test_aqsgd_in_one_batch_twice_remembers_the_later_one():
    method = method_of(states=CompressionConfig(kind="quantise", bits=8, feedback="aqsgd"))
    ids = ids_of(0)[:1].expand(2, -1)
    arrived = forward(method, values(0), 0, ids)
    (known,) = method.sender_state()["states.rows"]
    assert torch.equal(known, arrived[1].flatten())
    assert same(method.sender_state(), method.receiver_state())


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aqsgd"])
def test_validation_is_compressed_and_not_remembered(feedback):
    settings = CompressionConfig(kind="topk", keep=0.2, feedback=feedback, format="fp32")
    method = method_of(states=settings)
    for step in range(3):
        forward(method, values(step), step, ids_of(step))
    kept = {name: tensor.clone() for name, tensor in {**method.sender_state(), **method.receiver_state()}.items()}
    state = values(9)
    arrived = forward(method, state, 0, ids_of(9), training=False)
    assert same({**method.sender_state(), **method.receiver_state()}, kept)
    plain = forward(method_of(states=replace(settings, feedback="none")), state, 0, training=False)
    if feedback == "ef21":
        copy = kept["states.copy_BTW"]
        assert torch.equal(((arrived - copy) != 0).sum((1, 2)), torch.tensor([8, 8]))
    else:
        assert torch.equal(arrived, plain)


def test_validation_may_send_states_whole():
    settings = {"states": CompressionConfig(kind="topk", keep=0.2, feedback="ef21"), "at_inference": False}
    method = method_of(**settings)
    whole = method.at_inference
    assert whole.forward_nbytes == 2 * 6 * 2 + 2 * 5 * 8 * 4 > method.forward_nbytes
    assert torch.equal(forward(whole, values(0), 0, training=False), values(0))
    assert method_of(states=settings["states"]).at_inference.forward_nbytes == method.forward_nbytes


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aqsgd"])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda asked: asked.kind)
def test_a_message_that_is_not_finite_is_passed_on_and_not_remembered(feedback, compression):
    method = method_of(states=replace(compression, feedback=feedback))
    forward(method, values(0), 0)
    state = values(1)
    state[0, 0, 0] = torch.nan
    assert not forward(method, state, 1).isfinite().all()
    assert forward(method, values(2), 2).isfinite().all()
    assert all(tensor.isfinite().all() for tensor in {**method.sender_state(), **method.receiver_state()}.values())


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aqsgd"])
def test_restored_codec_state_continues_bit_for_bit(feedback):
    settings = {"states": CompressionConfig(kind="topk", keep=0.2, feedback=feedback)}
    if feedback != "aqsgd":
        settings["gradients"] = CompressionConfig(kind="quantise", bits=3, feedback=feedback)
    whole, first, then = (method_of(**settings) for _ in range(3))
    for step in range(10):
        if step == 5:
            then.load_sender_state({name: tensor.clone() for name, tensor in first.sender_state().items()})
            then.load_receiver_state({name: tensor.clone() for name, tensor in first.receiver_state().items()})
        resumed = first if step < 5 else then
        for run in (forward, backward):
            assert torch.equal(run(whole, values(step), step), run(resumed, values(step), step))
    assert same(whole.sender_state(), then.sender_state())
    assert same(whole.receiver_state(), then.receiver_state())


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aqsgd"])
def test_codec_state_of_another_shape_or_kind_is_refused(feedback):
    states = CompressionConfig(kind="topk", keep=0.2, feedback=feedback)
    method, longer = method_of(states=states), method_of(replace(SHAPE, tokens=6), states=states)
    with pytest.raises(UserError, match=r"model\.initial"):
        longer.load_sender_state(method.sender_state())
    with pytest.raises(UserError, match=r"model\.initial"):
        longer.load_sender_state({})


def test_methods_without_feedback_have_no_codec_state():
    for compression in COMPRESSIONS:
        method = method_of(states=compression, gradients=compression)
        forward(method, values(0), 0)
        assert method.sender_state() == method.receiver_state() == {}


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_store_grows_and_is_saved_and_loaded(on_disk, tmp_path):
    stores = [RowStore(3, tmp_path if on_disk else None) for _ in range(2)]
    keys = list(range(-50, 50))
    for key in keys:
        stores[0].write([key], torch.full((1, 3), float(key)))
    stores[0].write([7, 8], torch.zeros(2, 3))
    stores[1].write([999], torch.ones(1, 3))
    stores[1].load({name: tensor.clone() for name, tensor in stores[0].state().items()})
    expected = torch.tensor([0.0 if key in (7, 8) else float(key) for key in keys])[:, None].expand(-1, 3)
    for store in stores:
        assert torch.equal(store.read(keys), expected)
        assert torch.equal(store.read([999, 5]), torch.tensor([[0.0] * 3, [5.0] * 3]))
