"""Optimiser state in host memory (`training.offload`): the same bits as on the device, less memory of the device.

`tests/device/test_entries.py` trains with it in every kind of model, precision and optimiser; here are slices, memory
and several steps of the larger kinds.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.device.entries import digest
from tests.pipeline.cases import CASES, TOKENS, VOCABULARY, batch_size, config_of
from tests.reference.language import SyntheticLanguage
from thinpipe.config import offload
from thinpipe.optim import RowwiseAdamW
from thinpipe.subspace.parameter_tags import mark_coordinates, mark_orthonormal
from thinpipe.training.engine import Engine

STEPS = 5
WITH, WITHOUT = "optimizer", "none"


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(offload, "BUFFER_NBYTES", 1 << 12)


def parameters_on(device, dtype=torch.float32):
    """Every kind of parameter: sliced in rows of odd lengths, with one second moment per row, that cannot be sliced."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1000, 7), (5000,), (1,), (900, 5), (6, 1200), (40, 4), (600, 3)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[5] = torch.linalg.qr(values[5]).Q.contiguous()
    parameters = [nn.Parameter(value.to(device, dtype)) for value in values]
    mark_coordinates(parameters[3], axis=1, full_width=32)
    mark_coordinates(parameters[4], axis=0, full_width=32)
    mark_orthonormal(parameters[5])
    return parameters


def optimizer_of(parameters, **settings):
    named = [(f"parameter {index}", parameter) for index, parameter in enumerate(parameters)]
    groups = [{"params": named[:4]}, {"params": named[4:], "weight_decay": 0.0}]
    return RowwiseAdamW(groups, lr=0.02, weight_decay=0.1, **settings)


def feed(optimizer, steps):
    """Gradients of these steps."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()


def digests(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        (digest(parameter), *((name, digest(tensor)) for name, tensor in optimizer.state[parameter].items()))
        for parameter in parameters
    ]


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("second_moment", ["row", "element"])
@pytest.mark.usefixtures("small_buffers")
def test_slices_change_no_bit(sim, second_moment, dtype, fused):
    """With 8-bit moments too, whose blocks of numbers that share a scale end in the middle of rows."""
    settings = {"second_moment": second_moment, "fused": fused}
    whole = optimizer_of(parameters_on("sim", dtype), **settings)
    feed(whole, range(STEPS))
    sim.reset_counts()
    sliced = optimizer_of(parameters_on("sim", dtype), offload=True, **settings)
    feed(sliced, range(STEPS))
    assert digests(sliced) == digests(whole)
    tensors = sum(tensor.dim() > 0 for state in sliced.state.values() for tensor in state.values())
    assert sim.counts()["to_device_non_blocking"] == sim.counts()["to_host_non_blocking"] > STEPS * tensors


def test_numbers_of_one_vector_are_in_one_slice(sim, monkeypatch):  # noqa: ARG001
    """The kernels of a CPU round what fills no vector in another way: without alignment bits would depend on slices."""
    monkeypatch.setattr(offload, "BUFFER_NBYTES", 1 << 10)
    monkeypatch.setattr(offload, "ALIGNED_ROWS", 1)
    optimizers = [optimizer_of(parameters_on("sim"), offload=offloaded) for offloaded in (True, False)]
    for optimizer in optimizers:
        feed(optimizer, range(STEPS))
    assert digests(optimizers[0]) != digests(optimizers[1])


@pytest.mark.usefixtures("sim", "small_buffers")
def test_state_is_in_host_memory_also_after_loading_it():
    straight, first = (optimizer_of(parameters_on("sim"), offload=True) for _ in range(2))
    feed(straight, range(STEPS))
    feed(first, range(2))
    second = optimizer_of([parameter for group in first.param_groups for parameter in group["params"]], offload=True)
    second.load_state_dict(first.state_dict())
    for state in second.state.values():
        assert all(tensor.is_pinned() for tensor in state.values() if tensor.dim())
    feed(second, range(2, STEPS))
    assert digests(second) == digests(straight)


def test_a_parameter_without_gradient_is_left_alone(sim):  # noqa: ARG001
    used, unused = parameters_on("sim")[:2]
    optimizer = RowwiseAdamW([used, unused], offload=True)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert not optimizer.state[unused]
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[used]["step"] == 1


# Whole models.


def engine_of(name, device, place):
    case = next(case for case in CASES if case.name == name)
    config = config_of(case, 2, "1F1B")
    config = replace(
        config,
        training=replace(config.training, device=device, offload=place),
        basis=replace(config.basis, interval=3),
    )
    return Engine(config, config.model.resolve(VOCABULARY))


def trained(engine, steps=range(STEPS)):
    """Losses, changes of basis and digests of the state, of steps that follow each other."""
    language, seen = SyntheticLanguage(VOCABULARY, seed=1), []
    for step in steps:
        outcome = engine.step(step, language.batch(step, batch_size(2), TOKENS).numpy(), lr=3e-3)
        assert outcome.fault is None
        seen.append((outcome.loss, outcome.grad_norm))
        if engine.basis_is_due(step + 1):
            seen.append(repr(engine.update_basis(language.batch(1000, batch_size(2), TOKENS).numpy())))
    layers = engine.state(with_space=True).items()
    return seen, {f"{layer}/{name}": digest(tensor) for layer, tensors in layers for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["llama-none-fp32-fp32", "llama-subspace-fp32-fp32", "keel", "learned"])
@pytest.mark.usefixtures("sim", "small_buffers")
def test_steps_are_those_without_offload_on_every_device(name):
    expected = trained(engine_of(name, "cpu", WITHOUT))
    for device, place in (("cpu", WITH), ("sim", WITHOUT), ("sim", WITH)):
        assert trained(engine_of(name, device, place)) == expected


def test_state_takes_no_memory_of_the_device_but_two_buffers_during_the_update(sim, monkeypatch):
    monkeypatch.setattr(offload, "BUFFER_NBYTES", 1 << 14)
    held, taken = {}, {}
    for place in (WITHOUT, WITH):
        before = sim.memory_allocated()
        engine = engine_of("llama-none-fp32-fp32", "sim", place)
        trained(engine)
        held[place] = sim.memory_allocated() - before
        sim.reset_peak_memory_stats()
        engine.optimizer.step()
        taken[place] = sim.max_memory_allocated() - before - held[place]
        states = [
            [(len(parameter), 8 * parameter[0].numel()) for parameter in group["params"]]
            for group in engine.optimizer.param_groups
        ]
        del engine
    assert held[WITHOUT] - held[WITH] == sum(rows * nbytes for group in states for rows, nbytes in group)
    promised = max(map(offload.streamed_nbytes, states))
    assert promised <= 2 * offload.BUFFER_NBYTES < held[WITHOUT] - held[WITH]
    step_counts_and_padding = sum(4 + 2 * 256 for group in states for _ in group)
    assert promised <= taken[WITH] - taken[WITHOUT] <= promised + step_counts_and_padding
