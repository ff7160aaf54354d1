"""The device `sim` computes what the CPU computes, and behaves towards its users as an accelerator does."""

import copy
import io
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from thinpipe.models import ExecutionConfig, GPT2Config, LlamaConfig, SubspaceConfig, build, materialise
from thinpipe.optim import RowwiseAdamW

CUT = {"boundaries": (1, 3), "subspace": SubspaceConfig(width=6)}
LLAMA = LlamaConfig(vocab_size=96, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=80, max_seq_len=24, **CUT)
GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=4, n_heads=4, max_seq_len=24, **CUT)
IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


def train(config, device, *, steps=3, fused=True, autocast=False):
    """Losses and final parameters, on the CPU."""
    model = materialise(build(config), seed=1, device=device)
    model.set_execution(ExecutionConfig(), autocast_bf16=autocast)
    optimizer = RowwiseAdamW(model.parameters(), lr=1e-2, fused=fused)
    ids, losses = IDS.to(device), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, dropout_seed=step).float().flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("config", [LLAMA, GPT2, replace(GPT2, dropout=0.1)], ids=["llama", "gpt2", "dropout"])
def test_a_model_trains_as_on_the_cpu_bit_for_bit(sim, config, fused):
    losses, parameters = train(config, "sim", fused=fused)
    expected_losses, expected = train(config, "cpu", fused=fused)
    assert losses == expected_losses
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert ("aten::_fused_adamw_" in sim.kernel_counts()) == fused
    assert sim.counts()["kernels"] > 1000


def test_attention_is_the_kernel_of_the_cpu(sim):
    def attention(device):
        heads = [torch.linspace(i, i + 1, 256).sin().view(1, 2, 16, 8).to(device).requires_grad_() for i in range(3)]
        output = F.scaled_dot_product_attention(*heads, is_causal=True)
        output.square().sum().backward()
        return [output.detach().cpu(), *(head.grad.cpu() for head in heads)]

    assert all(torch.equal(here, there) for here, there in zip(attention("sim"), attention("cpu"), strict=True))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in sim.kernel_counts()


def test_autocast_computes_in_bfloat16(sim):  # noqa: ARG001
    layer, x = torch.nn.Linear(8, 8).to("sim"), torch.ones(2, 8, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert layer(x).softmax(-1).dtype == torch.float32
    losses, _ = train(LLAMA, "sim", autocast=True)
    exact, _ = train(LLAMA, "sim")
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses != exact


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_torch_work(sim, kind):  # noqa: ARG001
    def step(device):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).to(device))
        optimizer = torch.optim.AdamW([weight], **{kind: True})
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
        return weight.detach().cpu()

    assert torch.equal(step("sim"), step("cpu"))


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: here @ there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: F.embedding(there.long(), here),
        lambda here, there: F.linear(there, here),
        lambda here, there: here.add_(there),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_do_not_mix(sim, mix, other):  # noqa: ARG001
    here, there = torch.ones(3, 3, device="sim:0"), torch.ones(3, 3, device=other)
    with pytest.raises(RuntimeError, match="to be on the same device, but found at least two devices"):
        mix(here, there)


def test_numbers_and_indices_may_be_on_the_cpu(sim):
    x = torch.arange(4.0, device="sim")
    x[torch.tensor([0, 1])] = torch.tensor(7.0)
    assert (x * torch.tensor(2.0)).tolist() == [14, 14, 4, 6]
    assert x[torch.tensor([3, 0])].tolist() == [3, 7]
    assert sim.counts()["to_device_blocking"] == 3  # torch copies both indices, and the number that it assigns


def test_float64_is_refused_when_told(sim):
    x, y = torch.ones(3, device="sim"), torch.ones(3, dtype=torch.float64)
    y.to("sim")
    assert torch.float64 in torch._C._accelerator_getDeviceCapability(0)["supported_dtypes"]
    sim.set_float64(False)
    attempts = [
        lambda: torch.zeros(3, dtype=torch.float64, device="sim"),
        lambda: torch.tensor([1.0], dtype=torch.float64, device="sim"),
        lambda: x.double(),
        lambda: y.to("sim"),
        lambda: x.sum(dtype=torch.float64),
        lambda: torch.ones(4, device="sim").view(torch.float64),
        lambda: torch.empty_strided((2,), (1,), dtype=torch.complex128, device="sim"),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match="doesn't support float64"):
            attempt()
    assert (x * 0.5 + torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float32
    assert torch.float64 not in torch._C._accelerator_getDeviceCapability(0)["supported_dtypes"]


def test_copies_and_synchronisations_are_counted(sim):
    pageable, pinned = torch.ones(10), torch.ones(10).pin_memory()
    pageable.to("sim")
    pinned.to("sim")
    pageable.to("sim", non_blocking=True)
    x = pinned.to("sim", non_blocking=True)
    x.cpu()
    x.to("cpu", non_blocking=True)  # into pinned memory, as on CUDA
    pageable.copy_(x, non_blocking=True)  # the host waits all the same
    x.sum().item()
    x.nonzero()
    event = torch.Event("sim")
    event.record()
    event.synchronize()
    sim.current_stream().synchronize()
    sim.synchronize()
    x.to("sim:1")
    expected = {
        **{"to_device_blocking": 2, "to_device_staged": 1, "to_device_non_blocking": 1, "to_device_bytes": 160},
        **{"to_host_blocking": 2, "to_host_non_blocking": 1, "to_host_bytes": 120},
        **{"between_devices": 1, "between_devices_bytes": 40, "kernels": 2},
        **{"synchronize_item": 1, "synchronize_shape": 1},
        **{"synchronize_event": 1, "synchronize_stream": 1, "synchronize_device": 1},
    }
    assert dict(sim.counts()) == expected
    sim.reset_counts()
    assert not sim.counts()


def test_pinned_memory_is_known_by_its_address(sim):  # noqa: ARG001
    pinned = torch.empty(8, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(3, device="sim", pin_memory=True)


def test_every_device_has_a_generator_of_its_own(sim):
    def draw(device):
        return torch.rand(4, device=device).cpu()

    torch.manual_seed(3)
    first, other, host = draw("sim:0"), draw("sim:1"), draw("cpu")
    assert torch.equal(first, other)  # the same seed, as on CUDA
    assert not torch.equal(first, host)  # but not the numbers of the CPU
    state = sim.get_rng_state(0)
    second = draw("sim:0")
    assert not torch.equal(first, second)
    sim.set_rng_state(state, 0)
    assert torch.equal(draw("sim:0"), second)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        third = draw("sim:0")
    assert torch.equal(draw("sim:0"), third)
    own = torch.Generator("sim:0").manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim:0", generator=own).cpu(), first)
    assert own.initial_seed() == 3
    with pytest.raises(RuntimeError, match="'sim' device type for generator"):
        torch.rand(4, device="sim", generator=torch.Generator())


def test_dropout_draws_from_the_device(sim):
    state, x = torch.get_rng_state(), torch.ones(64, device="sim")
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert set(first.tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    sim.manual_seed_all(0)
    again = F.dropout(x, 0.5)
    sim.manual_seed_all(0)
    assert torch.equal(F.dropout(x, 0.5), again)


def test_the_generic_functions_of_torch_know_the_device(sim):
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.ones(2, device="sim").is_sim
    before = torch.accelerator.memory_allocated(1)
    with sim.device(1):
        assert torch.accelerator.current_device_index() == 1
        x = torch.ones(256, device="sim")
    assert torch.accelerator.current_device_index() == 0
    assert x.device == torch.device("sim:1")
    assert torch.accelerator.memory_allocated(1) - before == 1024
    assert torch.accelerator.max_memory_allocated(1) >= before + 1024
    free, total = torch.accelerator.get_memory_info(1)
    assert 0 < free < total
    del x
    assert torch.accelerator.memory_allocated(1) == before
    stream = torch.Stream("sim:1")
    with stream:
        assert torch.accelerator.current_stream("sim:1") == stream
        assert torch.accelerator.current_stream("sim:0") == sim.default_stream(0)
    with pytest.raises(RuntimeError, match="there is no device sim:2"):
        torch.ones(2, device="sim:2")


def test_hidden_the_device_is_not_available(sim):
    sim.set_visible(False)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    assert torch.ones(2, device="sim").sum().item() == 2


def test_a_tensor_can_be_saved_and_copied(sim):  # noqa: ARG001
    x = torch.arange(4.0, device="sim:1")
    file = io.BytesIO()
    torch.save({"x": x, "host": x.cpu()}, file)  # noqa: TID251  what users of torch do
    for where, device in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)  # noqa: TID251
        assert loaded["x"].device == torch.device(device)
        assert loaded["x"].tolist() == loaded["host"].tolist() == [0, 1, 2, 3]
    model = torch.nn.Linear(2, 2).to("sim")
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight)
    assert twin.weight.data_ptr() != model.weight.data_ptr()


def test_storages_can_be_resized_and_views_share_them(sim):
    x = torch.arange(6.0, device="sim")
    x.view(2, 3)[1].mul_(10)
    torch.view_as_complex(x.view(3, 2)).mul_(2)
    assert x.tolist() == [0, 2, 4, 60, 80, 100]
    x.resize_(8)
    assert x[:6].tolist() == [0, 2, 4, 60, 80, 100]
    target = torch.empty(0, device="sim")
    torch.add(x, 1, out=target)
    assert target.shape == (8,)
    assert target.is_sim
    assert "aten::view_as_complex" not in sim.kernel_counts()


def test_two_threads_compute_at_once(sim):
    def work(index, results):
        stream = torch.Stream("sim")
        with stream:
            weight = torch.full((16, 16), 0.1 * (index + 1), device="sim", requires_grad=True)
            x = torch.ones(16, 16, device="sim")
            for _ in range(30):
                x = torch.tanh(x @ weight)
            x.sum().backward()
            results[index] = weight.grad.cpu()

    found, expected = {}, {}
    threads = [threading.Thread(target=work, args=(index, found)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        work(index, expected)
    assert all(torch.equal(found[index], expected[index]) for index in range(2))
    assert sim.current_stream() == sim.default_stream()
