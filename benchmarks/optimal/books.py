"""Splits the validation books: one half to tune learning rates on, the other half for the losses that are reported."""

import json
import shutil
from pathlib import Path

import numpy as np

from benchmarks.finetune.books import split_documents
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.data import ShardWriter, Tokenizer, Tokens, has_tokens

HALVES = {"tuning": slice(0, None, 2), "reported": slice(1, None, 2)}
"""Name of a half -> its books, by their position among the validation books."""


def split_books(data: Path, folder: Path) -> None:
    """Writes FOLDER/tuning and FOLDER/reported: all training tokens (a link) and every other validation book.

    `data` is a folder made by `thinpipe tokenize`. Does nothing if both folders are complete.
    """
    for name, half in HALVES.items():
        target = folder / name
        if has_tokens(target / "validation"):
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for part in ("train", "tokenizer"):
            (target / part).symlink_to((data / part).resolve(), target_is_directory=True)
        _write_half(data, target / "validation", half)


def _write_half(data: Path, folder: Path, half: slice) -> None:
    tokens, tokenizer = Tokens(data / "validation"), Tokenizer.load(data / "tokenizer")
    books = split_documents(tokens)
    if len(books) < 2:
        raise UserError(f"{data / 'validation'} has one book, and two halves are needed: tokenize more of them")
    with ShardWriter(folder, tokens.manifest.vocabulary, source=tokens.manifest.source) as writer:
        for book in books[half]:
            writer.add(book.astype(np.uint32), text_nbytes=len(tokenizer.decode(book.tolist()).encode()))
        writer.finish()


def refuse_other_data(data: Path, output: Path) -> None:
    """Notes in OUTPUT/data.json which tokens the study is made with, and raises UserError if that were others."""
    path = output / "data.json"
    found = {side: Tokens(data / side).manifest.content_sha256 for side in ("train", "validation")}
    if path.is_file() and json.loads(path.read_text()) != found:
        raise UserError(f"the records in {output} were made with other tokens than those in {data}: see {path}")
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
