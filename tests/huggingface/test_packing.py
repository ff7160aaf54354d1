"""Several chats in a row are computed as each would be alone, in segments too, and refused where the probe says no."""

from dataclasses import replace

import numpy as np
import pytest

from tests.data.chats import write_chats
from tests.huggingface.models import save_model, small_config
from tests.huggingface.runs import run_config
from thinpipe.core.errors import UserError
from thinpipe.data.chat.rows import ChatRows
from thinpipe.models.hf import probe_cache
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.models.hf.probe import Check, ProbeResult
from thinpipe.models.protocol import refuse_packing
from thinpipe.training.engine import Engine

LENGTHS, SEQ_LEN = (5, 9, 11, 16, 3, 20, 14, 22), 24


def engine_of(model, rows, *, packing):
    config = run_config("exact")
    training = replace(config.training, global_batch_size=rows, seq_len=SEQ_LEN, packing=packing, max_norm=1e9)
    parallelism = replace(config.parallelism, pipeline_parallel_microbatch_size=1)
    return Engine(replace(config, training=training, parallelism=parallelism), model, chats=True)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt2"])
def test_packed_chats_have_the_loss_and_the_gradients_of_chats_alone(model_type, tmp_path):
    save_model(small_config(model_type, tie_word_embeddings=False), tmp_path / "model")
    model = read_model(tmp_path / "model", (2, 4))
    chats = write_chats(tmp_path / "chats", LENGTHS)
    outcomes, gradients = [], []
    for packing in (False, True):
        rows = ChatRows(chats, SEQ_LEN, packing=packing)
        engine = engine_of(model, len(rows), packing=packing or None)
        outcomes.append(engine.step(0, rows.read(np.arange(len(rows))), lr=0.0))
        gradients.append({name: p.grad.clone() for name, p in engine.parameters.items()})
    assert len(rows) == 4 < len(LENGTHS)
    assert outcomes[1].loss == pytest.approx(outcomes[0].loss, rel=1e-6)
    for name, gradient in gradients[0].items():
        difference = (gradients[1][name] - gradient).norm() / outcomes[0].grad_norm
        assert difference < 1e-5, name


def test_packing_is_refused_where_the_probe_shows_that_it_leaks(tmp_path, monkeypatch):
    save_model(small_config("qwen3"), tmp_path)
    model = read_model(tmp_path, (2, 4))
    refuse_packing(model)
    leaks = Check(name="packing", works=False, detail="a text sees the one before it in its row")
    result = ProbeResult(model_type="qwen3", checks=(leaks,))
    monkeypatch.setattr(probe_cache, "probed", lambda _: result)
    with pytest.raises(UserError, match=r"training.packing does not work with qwen3: a text sees the one before it"):
        refuse_packing(model)
    with pytest.raises(UserError, match=r"training.packing does not work"):
        engine_of(replace(model, boundaries=()), 1, packing=True)
