"""Tokens of a small language made with SHA-256 alone, so that no generator of random numbers can change them."""

import hashlib
from pathlib import Path

import numpy as np

from thinpipe.data import ShardWriter, Vocabulary

VOCABULARY = Vocabulary(size=64, end_of_text_id=0, tokenizer_sha256="0" * 64)


def language(length: int) -> list[int]:
    """Every token has four likely successors."""
    ids = [1]
    while len(ids) < length:
        byte = hashlib.sha256(str(len(ids)).encode()).digest()[0]
        ids.append((5 * ids[-1] + 7 * (byte % 4) + 1) % VOCABULARY.size)
    return ids


def write_tokens(folder: Path, *, train: int, validation: int) -> Path:
    """A folder like those of `thinpipe tokenize`, with so many tokens on each side."""
    ids = np.array(language(train + validation), dtype=np.uint32)
    for side, part in (("train", ids[:train]), ("validation", ids[train:])):
        with ShardWriter(folder / side, VOCABULARY, source="made of SHA-256", max_shard_tokens=1_000_000) as writer:
            writer.add(part, text_nbytes=3 * (len(part) + 1))
            writer.finish()
    return folder
