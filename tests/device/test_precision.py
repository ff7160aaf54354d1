"""Which recipe a device computes with, what a run says of it, and which recipes a device refuses."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.programs import files_of
from thinpipe.config.run import JobConfig
from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import Started, read_events
from thinpipe.core.run_folder import checkpoints_path, events_path
from thinpipe.device.precision import has_bf16_units, set_float32_products
from thinpipe.models import kv_cache
from thinpipe.training.engine import Engine
from thinpipe.training.trainer import Trainer


def with_precision(run_config, precision, device="sim"):
    return replace(run_config, training=replace(run_config.training, precision=precision, device=device, steps=4))


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_device_without_units_for_bfloat16_refuses_it(sim, run_config, monkeypatch, precision):
    """As cards before Ampere, which would emulate it."""
    monkeypatch.setattr(sim, "is_bf16_supported", lambda including_emulation=True: including_emulation, raising=False)
    config = with_precision(run_config, precision)
    with pytest.raises(UserError, match=f'^simulated device has no units for bfloat16.*{precision!r}.*"fp32"'):
        Engine(config, config.model.resolve(64))


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (True, "bf16-mixed (auto: units for bfloat16)"),
        (False, "fp32 (auto: no units for bfloat16)"),
        (None, "fp32 (auto: no known units for bfloat16)"),
    ],
)
def test_a_run_says_which_recipe_it_chose_and_why(sim, run_config, monkeypatch, units, said):
    if units is None:
        monkeypatch.delattr(sim, "is_bf16_supported", raising=False)
    else:
        monkeypatch.setattr(sim, "is_bf16_supported", lambda including_emulation=True: units, raising=False)  # noqa: ARG005
    trainer = Trainer(with_precision(run_config, "auto"))
    assert trainer.engine.recipe.name == said.split()[0]
    trainer.train()
    [started] = [e for e in read_events(events_path(run_config.job.dump_folder)) if isinstance(e, Started)]
    assert started.precisions == [said]
    assert format_event_line(started).endswith(f"trainable parameters, precision {said}")


def test_a_recipe_that_was_asked_for_needs_no_reason(run_config):
    config = with_precision(run_config, "bf16", "cpu")
    assert Engine(config, config.model.resolve(64)).precision == "bf16"


def test_float32_products_use_tf32_on_cuda_only_if_asked():
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, found in ((True, "tf32"), (False, "ieee"), (True, "tf32")):
            set_float32_products(torch.device("cuda"), tf32=tf32)
            assert torch.backends.cuda.matmul.fp32_precision == found
            assert (torch.get_float32_matmul_precision() != "highest") == tf32  # torch's compiler asks here
        set_float32_products(torch.device("cpu"), tf32=False)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_units_for_bfloat16_are_those_of_the_device_that_was_asked_for(sim, monkeypatch):
    """In a machine with unlike cards: torch answers for its current one."""
    asked = []

    def supported(including_emulation=True):
        asked.append(including_emulation)
        return torch.accelerator.current_device_index() == 1

    monkeypatch.setattr(sim, "is_bf16_supported", supported, raising=False)
    assert [has_bf16_units(torch.device("sim", index)) for index in (0, 1, 0)] == [False, True, False]
    assert asked == [False] * 3
    assert torch.accelerator.current_device_index() == 0


def test_a_bf16_run_goes_on_on_another_device_bit_for_bit(sim, run_config, monkeypatch):  # noqa: ARG001
    """Weights, 8-bit moments and all that is rounded at random."""
    monkeypatch.setattr(kv_cache, "MAX_FLOAT32_ATTENTION_TOKENS", 0)  # bfloat16 attention on the CPU too
    model = replace(run_config.model, hidden_dim=160)
    config = replace(with_precision(run_config, "bf16", "cpu"), model=model)
    whole, resumed = (
        replace(config, job=JobConfig(dump_folder=run_config.job.dump_folder.with_name(name)))
        for name in ("whole", "resumed")
    )
    whole = replace(whole, training=replace(whole.training, steps=8))
    Trainer(whole).train()
    source = checkpoints_path(whole.job.dump_folder) / "step-00000004"
    shutil.copytree(source, checkpoints_path(resumed.job.dump_folder) / source.name)
    Trainer(replace(resumed, training=replace(whole.training, device="sim"))).train()
    assert files_of(resumed, 8) == files_of(whole, 8)
