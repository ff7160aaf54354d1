"""A small tokenizer and small tokens for all tests of data."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from thinpipe.data import ShardWriter, Tokenizer, Tokens, Vocabulary

VOCABULARY = Vocabulary(size=1000, end_of_text_id=0, tokenizer_sha256="0" * 64)


def random_text(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    letters = "etaoin shrdlu".replace(" ", "")
    return " ".join("".join(draw.choices(letters, k=draw.randint(1, 7))) for _ in range(words))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([random_text(2000), "It's 1984.\r\n\n  naïve café 東京 🙂"], vocab_size=400)


def write_numbers(folder: Path, count: int, *, max_shard_tokens: int = 100) -> Tokens:
    """The ids 1, 2, ... (modulo 999) and an end-of-text 0 as the last of `count` tokens."""
    with ShardWriter(folder, VOCABULARY, source="numbers", max_shard_tokens=max_shard_tokens) as writer:
        writer.add((np.arange(count - 1) % 999 + 1).astype(np.uint32), text_nbytes=3 * count)
        writer.finish()
    return Tokens(folder)


@pytest.fixture
def make_tokens(tmp_path: Path) -> Callable[..., Tokens]:
    """make_tokens(count), or make_tokens(count, name=...) for more than one."""
    return lambda count, name="tokens": write_numbers(tmp_path / name, count)
