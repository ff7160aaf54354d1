"""Memory of runs on Hugging Face models: counted to the byte where it is state, within bounds for activations."""

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tests.huggingface.run_files import WAYS, run_of
from thinpipe.config.hub import UpConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import CheckpointConfig, RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.models.hf.model_of_run import model_of_run
from thinpipe.planning.fitting import memory_of_processes
from thinpipe.planning.memory_budget import MemoryBudget
from thinpipe.planning.stored_model import stored_model_of
from thinpipe.swarm.hub.memory_check import check_up
from thinpipe.training import memory_check
from thinpipe.training.engine import Engine

HOST = MemoryBudget(place="here", free_nbytes=1 << 40)


def predicted(config):
    return memory_of_processes(config, stored_model_of(config), HOST)


def with_precision(config, precision):
    return replace(config, training=replace(config.training, precision=precision))


def state_of(engine):
    """Bytes of frozen parameters, of trained ones, of their gradients, and of their moments."""
    frozen, trained = 0, 0
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            trained += parameter.nbytes
        else:
            state = getattr(parameter, "quant_state", None)
            scales = 0 if state is None else state.absmax.nbytes + state.state2.absmax.nbytes
            frozen += parameter.nbytes + scales
    moments = sum(
        tensor.nbytes for state in engine.optimizer.state.values() for tensor in state.values() if tensor.dim()
    )
    return frozen, trained, sum(p.grad.nbytes for p in engine.parameters.values()), moments


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_is_counted_to_the_byte(model_type, way, precision, base_of, tune_tokens, tmp_path):
    """Trained weights exactly; frozen ones but for the padding of quantised scales."""
    config = with_precision(run_of(base_of(model_type), tune_tokens, tmp_path / "run", way), precision)
    engine = Engine(config, model_of_run(config))
    ids = np.random.default_rng(0).integers(3, 290, (8, 17))
    assert engine.step(0, ids, lr=1e-3).fault is None
    frozen, trained, gradients, moments = state_of(engine)
    [use] = predicted(config)
    assert (use.weights, use.gradients) == (trained, gradients)
    assert use.optimiser == pytest.approx(moments, rel=0.01)
    assert use.frozen == pytest.approx(frozen, rel=0.03 if config.model.quantize_base else 0)


@pytest.mark.parametrize("way", ["full", "LoRA"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2", "phi3"])
def test_activations_are_about_what_autograd_saves(model_type, way, base_of, tune_tokens, tmp_path):
    config = run_of(base_of(model_type, attn_pdrop=0.0), tune_tokens, tmp_path / "run", way, cuts=())
    config = replace(config, training=replace(config.training, seq_len=64))
    engine = Engine(config, model_of_run(config))
    engine.model.train()
    [segment] = engine.model.segments
    owned = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in owned:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 290, (config.microbatch_size, 65)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = segment(ids[:, :-1], dropout_seed=1, targets_BT=ids[:, 1:])
    assert loss.isfinite().all()
    [use] = predicted(config)
    assert 0.6 < use.activations / sum(saved.values()) < 1.8


def test_a_frozen_base_takes_no_gradients(base_of, tune_tokens, tmp_path):
    """In bf16: 2 bytes a frozen weight, and 16 a weight of an adapter."""
    config = with_precision(run_of(base_of("qwen3"), tune_tokens, tmp_path / "run"), "bf16")
    [full], [adapted] = (predicted(each) for each in (replace(config, lora=None), config))
    assert adapted.frozen == full.weights == full.gradients
    assert adapted.gradients == adapted.weights == adapted.optimiser // 2
    [doubled] = predicted(replace(config, lora=LoraConfig(r=2 * config.lora.r)))
    assert doubled.weights == 2 * adapted.weights
    halves = predicted(replace(config, parallelism=replace(config.parallelism, pipeline_parallel_degree=2)))
    assert sum(use.weights for use in halves) == adapted.weights
    assert sum(use.frozen for use in halves) == adapted.frozen


def test_a_run_that_is_too_large_is_refused_without_torch(base_of, tune_tokens, tmp_path):
    config = run_of(base_of("qwen3"), tune_tokens, tmp_path / "run", checkpoint=CheckpointConfig())
    memory_check.check_before_torch(config)
    long = replace(config, training=replace(config.training, seq_len=1 << 24))
    with pytest.raises(UserError, match="the run needs") as refused:
        memory_check.check_before_torch(long)
    assert "check_memory = false" in str(refused.value)
    settings = {field.name: getattr(long, field.name) for field in fields(RunConfig)}
    with pytest.raises(UserError, match="memory for 4 processes"):
        check_up(UpConfig(**settings, peers=4))
    (tmp_path / "run.toml").write_text(dump_toml(long))
    script = (
        "import sys; from pathlib import Path; from thinpipe.config.run import RunConfig; "
        "from thinpipe.config.toml import load_toml; from thinpipe.core.errors import UserError\n"
        "from thinpipe.training.memory_check import check_before_torch\n"
        "try: check_before_torch(load_toml(Path(sys.argv[1]), RunConfig))\n"
        "except UserError: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "False False\n"
