"""Training on packed chats whose messages are kept: by the processes of a pipeline what each of them received, by the
twin what crossed its boundaries."""

from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

import torch

from tests.huggingface.runs import MICROBATCH, packed_batch, run_config
from thinpipe.boundary.contract import BoundaryMethod
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.training.engine import Engine

CUTS = (2, 4, 6)
STEPS = 2


def train_chats(folder, *, schedule="1F1B", group=None):
    """A few steps and validation. Returns the engine."""
    model = read_model(folder, CUTS)
    config = run_config("rotated", 1 if group is None else group.size(), schedule)
    config = replace(config, training=replace(config.training, packing=True))
    engine = Engine(config, model, group, chats=True)
    for step in range(STEPS):
        assert engine.step(step, packed_batch(model.vocab_size, step), lr=1e-3).fault is None
    engine.evaluate([packed_batch(model.vocab_size, 100)])
    return engine


def microbatches(vocab_size):
    """Token ids with flags of all micro-batches, those of validation too, in the order of the messages."""
    batches = [packed_batch(vocab_size, step) for step in (*range(STEPS), 100)]
    return [part for batch in batches for part in torch.from_numpy(batch).split(MICROBATCH)]


def encoded_by_the_twin(folder):
    """Encoded states and gradients by boundary, in the order of the micro-batches."""
    found = {"states": defaultdict(list), "gradients": defaultdict(list)}
    encode_state, encode_gradient = BoundaryMethod.encode_state, BoundaryMethod.encode_gradient

    def keep_state(self, state, ids_BW, message_id):
        found["states"][message_id.boundary].append(encode_state(self, state, ids_BW, message_id))
        return found["states"][message_id.boundary][-1]

    def keep_gradient(self, gradient, message_id):
        found["gradients"][message_id.boundary].append(encode_gradient(self, gradient, message_id))
        return found["gradients"][message_id.boundary][-1]

    with (
        patch.object(BoundaryMethod, "encode_state", keep_state),
        patch.object(BoundaryMethod, "encode_gradient", keep_gradient),
    ):
        engine = train_chats(folder)
    return found, engine.model.config.vocab_size
