"""An exported folder opened with `transformers` against the run it came from: the same logits, the same greedy text."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinpipe.checkpoint import find_checkpoint, load_model
from thinpipe.models.generate import generate

NEW_TOKENS = 30


def assert_same_in_transformers(
    exported: Path, run: Path, prompt: str, *, trust: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the prompt's ids and our logits. `trust`: the code that comes with the folder."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=trust).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=trust)
    ours = load_model(find_checkpoint(run))
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        expected, got = ours(ids), theirs(ids).logits
    assert_close_logits(got, expected)
    text = theirs.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    stop_id = tokenizer.eos_token_id
    assert text == list(generate(ours, ids[0].tolist(), max_new_tokens=NEW_TOKENS, temperature=0.0, stop_id=stop_id))
    return ids, expected


def assert_close_logits(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-4
