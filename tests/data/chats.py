"""Chats of random tokens with flags, on disk and as batches, for tests of what comes after the template."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thinpipe.core.token_flags import BEGINS, TRAINED
from thinpipe.data import ShardWriter, Tokens, Vocabulary
from thinpipe.data.shards import ChatRendering

VOCABULARY = Vocabulary(size=64, end_of_text_id=0, tokenizer_sha256="0" * 64)
RENDERING = ChatRendering("1" * 64, "assistant")


def write_chats(folder: Path, lengths: Sequence[int], *, seed: int = 0, max_shard_tokens: int = 100) -> Tokens:
    """Chats of these lengths, whose last tokens are trained on: very different numbers of them."""
    draw = np.random.default_rng(seed)
    with ShardWriter(folder, VOCABULARY, source="chats", max_shard_tokens=max_shard_tokens, chat=RENDERING) as writer:
        for length in lengths:
            trained = np.arange(length) >= draw.integers(1, length)
            writer.add_chat(draw.integers(1, 64, length).astype(np.uint32), trained, text_nbytes=3 * length)
        writer.finish()
    return Tokens(folder)


def write_run_data(folder: Path, *, longest: int, count: int = 60) -> Path:
    """A folder that a run can train on."""
    draw = np.random.default_rng(7)
    for seed, side in enumerate(("train", "validation")):
        write_chats(folder / side, [longest, *draw.integers(3, longest + 1, count).tolist()], seed=seed)
    return folder


def flagged(ids_BW: np.ndarray, *, seed: int, documents: bool = False) -> np.ndarray:
    """The ids with flags: each row has another share of trained tokens, and the first row has none. `documents`:
    several in a row."""
    draw = np.random.default_rng(seed)
    shares_B1 = draw.random((len(ids_BW), 1))
    shares_B1[0] = 0
    trained_BW = draw.random(ids_BW.shape) < shares_B1
    begins_BW = draw.random(ids_BW.shape) < (0.2 if documents else 0)
    begins_BW[:, 0] = True
    return ids_BW | np.where(begins_BW, BEGINS, np.where(trained_BW, TRAINED, 0))
