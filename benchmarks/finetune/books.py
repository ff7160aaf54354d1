"""The books to fine-tune on: the first part of each to learn from, the part after it to be measured on.

They are the first validation books of a folder made by `thinpipe tokenize`, which the pretraining never sees. Few books
have more to teach than the same pages of many: their names and their manner come back.
"""

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinpipe.core.errors import UserError
from thinpipe.data import ShardWriter, Tokenizer, Tokens, has_tokens

Ids = npt.NDArray[np.int64]


def cut_books(source: Path, folder: Path, *, books: int, seq_len: int, samples: int, validation_samples: int) -> None:
    """Writes FOLDER/train and FOLDER/validation with exactly these numbers of samples; the same share of every book."""
    if has_tokens(folder / "train"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    tokens, tokenizer = Tokens(source / "validation"), Tokenizer.load(source / "tokenizer")
    documents = split_documents(tokens)[:books]
    first, second = (share(count * seq_len + 1, books) for count in (samples, validation_samples))
    if len(documents) < books or min(map(len, documents)) < first + second:
        raise UserError(
            f"{source / 'validation'}: {books} books of {first + second:,} tokens or more must come first there, and "
            f"these have {', '.join(f'{len(book):,}' for book in documents)}: tokenize others with --validation-sources"
        )
    # train comes last: where it is, both are whole
    parts = {"validation": slice(first, first + second), "train": slice(first)}
    for side, part in parts.items():
        with ShardWriter(folder / side, tokens.manifest.vocabulary, source=tokens.manifest.source) as writer:
            for book in documents:
                ids = book[part]
                writer.add(ids.astype(np.uint32), text_nbytes=len(tokenizer.decode(ids.tolist()).encode()))
            writer.finish()


def split_documents(tokens: Tokens) -> list[Ids]:
    """Without the tokens that close them."""
    ids = tokens.read(0, len(tokens))
    ends = np.flatnonzero(ids == tokens.manifest.vocabulary.end_of_text_id)
    return [document[:-1] for document in np.split(ids, ends + 1)[:-1]]


def share(total: int, documents: int) -> int:
    """Tokens of each document, so that all of them, each with its closing token, are `total` or hardly more."""
    return -(-total // documents) - 1
