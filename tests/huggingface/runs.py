"""Training steps of an engine on a Hugging Face model, and what they come to: for the twin and for real processes."""

import hashlib
from dataclasses import replace

import numpy as np

from tests.data.chats import flagged
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.run import ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.training.engine import Engine

BATCH, MICROBATCH, LENGTH, STEPS = 8, 2, 24, 3
ROTATED_INT8 = CompressionConfig(kind="quantise", bits=8, per="token", rotate=True)
ROTATED_INT4 = CompressionConfig(kind="quantise", bits=4, tile=32, rotate=True)
BOUNDARIES = {
    "exact": BoundaryConfig(),
    "int8": BoundaryConfig(forward="int8", backward="int8"),
    "rotated": BoundaryConfig(states=ROTATED_INT8, gradients=ROTATED_INT4),
}


LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1)


def batch(vocab_size, step=0):
    return np.random.default_rng(step).integers(3, vocab_size, (BATCH, LENGTH + 1))


def run_config(boundary, processes=1, schedule="1F1B", precision="fp32"):
    return RunConfig(
        model=ModelSettings(),
        training=TrainingConfig(
            steps=100, global_batch_size=BATCH, seq_len=LENGTH, device="cpu", precision=precision, max_norm=1.0
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=processes,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=MICROBATCH,
        ),
        boundary=BOUNDARIES[boundary],
    )


def packed_batch(vocab_size, step=0):
    """Several chats in a row, of which some tokens are trained on."""
    return flagged(batch(vocab_size, step), seed=step, documents=True)


def train(folder, cuts, boundary, *, lora=None, schedule="1F1B", group=None, packing=False):
    """Losses, norms, and digests of gradients, weights and moments after a few steps; with `packing`, one of them is
    done again after it failed."""
    model = replace(read_model(folder, cuts), lora=lora)
    processes = 1 if group is None else group.size()
    config, make_batch = run_config(boundary, processes, schedule), packed_batch if packing else batch
    if packing:
        config = replace(config, training=replace(config.training, packing=True))
    engine = Engine(config, model, group, chats=packing)
    seen, first = [], {}
    for step in range(STEPS):
        if packing and step == 1:
            fail(engine, step, make_batch(model.vocab_size, step))
        outcome = engine.step(step, make_batch(model.vocab_size, step), lr=1e-3)
        assert outcome.fault is None
        seen.append([outcome.loss, outcome.grad_norm])
        first = first or {name: digest(p.grad) for name, p in engine.parameters.items() if p.grad is not None}
    validation, _ = engine.evaluate([make_batch(model.vocab_size, 100)])
    return {
        "seen": seen,
        "validation": validation,
        "gradients": first,
        "weights": {name: digest(p) for name, p in engine.parameters.items()},
        "moments": {name: digest(engine.optimizer.state[p]["exp_avg"]) for name, p in engine.parameters.items()},
    }


def fail(engine, step, ids_BW):
    """A step with a parameter that is not finite."""
    parameter = next(iter(engine.parameters.values()))
    kept = parameter.detach().clone()
    parameter.data.fill_(float("nan"))
    assert engine.step(step, ids_BW, lr=1e-3).fault is not None
    parameter.data.copy_(kept)


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
