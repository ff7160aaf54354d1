"""Real books, when they are there: THINPIPE_BOOKS names the folder, or it lies beside the repository."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from thinpipe.data import Batches, Cursor, TokenizeConfig, Tokenizer, Tokens, open_sources, prepare, sequential_batches

BOOKS = Path(os.environ.get("THINPIPE_BOOKS", Path(__file__).parents[3] / "shared" / "data" / "books"))


def test_six_books_from_parquet_to_batches(tmp_path: Path) -> None:
    path = BOOKS / "validation.parquet"
    if not path.is_file():
        pytest.skip(f"{path} is missing: set THINPIPE_BOOKS to a folder with validation.parquet to run this")
    pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    texts = [document.text for document in open_sources([str(path)]).documents()]
    prepared = prepare(TokenizeConfig(sources=(str(path),), output=tmp_path, vocab_size=1024, max_shard_tokens=100_000))
    tokens, tokenizer = Tokens(tmp_path / "train"), Tokenizer.load(tmp_path / "tokenizer")
    tokens.verify()
    assert prepared.train.documents == len(texts) == 6
    assert prepared.train.text_nbytes == sum(len(text.encode()) for text in texts)
    assert 2.0 < prepared.train.text_bytes_per_token < 4.0
    assert prepared.train.bits_per_byte(math.log(1024)) == pytest.approx(10 / prepared.train.text_bytes_per_token)
    assert tokenizer.decode(tokens.read(0, len(tokens)).tolist()) == "".join(text + "<|endoftext|>" for text in texts)

    ids = [ids_BW for ids_BW, _ in sequential_batches(tokens, seq_len=256, batch_size=100)]
    labels = np.concatenate([ids_BW[:, 1:].ravel() for ids_BW in ids])
    assert np.array_equal(labels, tokens.read(1, 1 + len(labels)))
    batch = Batches(tokens, seq_len=256, batch_size=8, seed=0).batch_at(Cursor(samples_seen=1000))
    assert tokenizer.decode(batch.ids_BW[0].tolist()).strip("\ufffd") in "<|endoftext|>".join(texts)
