"""One call from text to tokens that a run can open: both sides of a split, repeatable, careful with what exists."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import random_text
from thinpipe.data import DataError, Manifest, ShardWriter, TokenizeConfig, Tokenizer, Tokens, prepare

TEXTS = [random_text(30, seed) for seed in range(200)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def config_for(corpus: Path, **changes: Any) -> TokenizeConfig:
    given = {"sources": (str(corpus),), "output": corpus.parent / "out", **changes}
    if "tokenizer" not in given:
        given.setdefault("vocab_size", 300)
    return TokenizeConfig(**given)


def documents_of(folder: Path) -> list[str]:
    """The documents back from the tokens, with the tokenizer that was saved beside them."""
    tokens, tokenizer = Tokens(folder), Tokenizer.load(folder.parent / "tokenizer")
    tokens.verify()
    assert tokens.manifest.vocabulary == tokenizer.vocabulary
    ids = tokens.read(0, len(tokens))
    ends = np.flatnonzero(ids == tokenizer.vocabulary.end_of_text_id)
    assert ends[-1] == len(ids) - 1
    documents = [tokenizer.decode(part[part != 0].tolist()) for part in np.split(ids, ends + 1)[:-1]]
    assert len(documents) == tokens.manifest.documents
    assert sum(len(text.encode()) for text in documents) == tokens.manifest.text_nbytes
    return documents


def test_the_documents_are_all_there_in_order(corpus: Path) -> None:
    prepared = prepare(config_for(corpus, max_shard_tokens=1000))
    assert documents_of(corpus.parent / "out" / "train") == TEXTS
    assert len(prepared.train.shards) > 3
    assert prepared.validation is None
    assert not (corpus.parent / "out" / "validation").exists()
    assert prepared.train.source == str(corpus)


def test_it_is_repeatable(corpus: Path) -> None:
    def content(output: str, **changes: Any) -> tuple[str, Manifest | None]:
        prepared = prepare(config_for(corpus, output=corpus.parent / output, validation_fraction=0.2, **changes))
        return prepared.train.content_sha256, prepared.validation

    assert content("a") == content("b") != content("c", validation_seed=1)


def test_a_fraction_of_the_documents(corpus: Path) -> None:
    prepare(config_for(corpus, validation_fraction=0.2))
    out = corpus.parent / "out"
    train, validation = documents_of(out / "train"), documents_of(out / "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert 20 <= len(validation) <= 60
    assert Tokens(out / "validation").manifest.source == f"0.2 of the documents of {corpus}"


def test_the_choice_depends_on_the_text_alone(corpus: Path) -> None:
    prepare(config_for(corpus, validation_fraction=0.2))
    before = set(documents_of(corpus.parent / "out" / "validation"))
    shuffled = "".join(json.dumps({"text": text}) + "\n" for text in [*reversed(TEXTS), *TEXTS, "more"])
    corpus.write_text(shuffled)
    prepare(config_for(corpus, validation_fraction=0.2, overwrite=True))
    assert set(documents_of(corpus.parent / "out" / "validation")) - {"more"} == before
    assert not before & set(documents_of(corpus.parent / "out" / "train"))


def test_the_manifest_for_training_is_written_last(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a killed preparation never looks finished with one side missing."""
    finished: list[str] = []
    finish = ShardWriter.finish

    def record(writer: ShardWriter) -> Manifest:
        finished.append(writer.folder.name)
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", record)
    prepare(config_for(corpus, validation_fraction=0.2))
    assert finished == ["validation", "train"]


def test_a_separate_source_for_validation(corpus: Path) -> None:
    (corpus.parent / "held-out.txt").write_text("held out\n<|endoftext|>\nsecond\n")
    prepare(config_for(corpus, validation_sources=(str(corpus.parent / "held-out.txt"),)))
    assert documents_of(corpus.parent / "out" / "validation") == ["held out\n", "second\n"]
    assert documents_of(corpus.parent / "out" / "train") == TEXTS


def test_the_tokenizer_does_not_see_validation_text(corpus: Path) -> None:
    held_out = corpus.parent / "held-out.txt"
    held_out.write_text("xyzzyx " * 5000)
    first = prepare(config_for(corpus, output=corpus.parent / "a"))
    second = prepare(config_for(corpus, output=corpus.parent / "b", validation_sources=(str(held_out),)))
    assert first.tokenizer.vocabulary == second.tokenizer.vocabulary


def test_an_existing_tokenizer(corpus: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(corpus.parent / "given")
    prepared = prepare(config_for(corpus, tokenizer=corpus.parent / "given"))
    assert prepared.train.vocabulary == tokenizer.vocabulary
    assert documents_of(corpus.parent / "out" / "train") == TEXTS


def test_limits(corpus: Path) -> None:
    prepare(config_for(corpus, max_documents=7, vocab_size=257))
    assert documents_of(corpus.parent / "out" / "train") == TEXTS[:7]
    with pytest.raises(DataError, match="too short for vocab_size 5,000"):
        prepare(config_for(corpus, output=corpus.parent / "b", vocab_size=5000, tokenizer_text_nbytes=10))


def test_existing_tokens_are_kept_unless_overwriting_is_allowed(corpus: Path) -> None:
    out = corpus.parent / "out"
    prepare(config_for(corpus, validation_fraction=0.2))
    with pytest.raises(DataError, match="already holds finished tokens"):
        prepare(config_for(corpus))
    prepare(config_for(corpus, overwrite=True, vocab_size=310))
    assert documents_of(out / "train") == TEXTS
    with pytest.raises(DataError, match="no finished tokens"):  # those of the first call, with another tokenizer
        Tokens(out / "validation")


def test_an_error_before_writing_keeps_the_old_tokens(corpus: Path) -> None:
    prepare(config_for(corpus))
    with pytest.raises(DataError, match="does not exist"):
        prepare(config_for(corpus, overwrite=True, tokenizer=Path("missing")))
    assert documents_of(corpus.parent / "out" / "train") == TEXTS


def test_an_error_in_the_text_leaves_nothing_that_opens(corpus: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(corpus.parent / "given")
    corpus.write_text(corpus.read_text() + '{"text": 3}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 201: 'text' is int"):
        prepare(config_for(corpus, tokenizer=corpus.parent / "given", validation_fraction=0.5))
    for side in ("train", "validation"):
        with pytest.raises(DataError, match="no finished tokens"):
            Tokens(corpus.parent / "out" / side)


def test_progress_reaches_the_end(corpus: Path) -> None:
    seen: dict[str, tuple[int | None, list[int]]] = {}

    @contextmanager
    def progress(label: str, total_nbytes: int | None) -> Iterator[Any]:
        seen[label] = (total_nbytes, [])
        yield seen[label][1].append

    prepare(config_for(corpus), progress)
    assert set(seen) == {"training the tokenizer", "tokenizing"}
    total, advances = seen["tokenizing"]
    assert total == sum(advances) == corpus.stat().st_size
    assert sum(seen["training the tokenizer"][1]) == sum(len(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"validation_fraction": 0.0}, "must lie between 0 and 1, for example 0.01"),
        ({"validation_fraction": 1.0}, "must lie between 0 and 1"),
        ({"validation_fraction": 0.1, "validation_sources": ("a",)}, "exclude each other"),
        ({"tokenizer": Path("a"), "vocab_size": 300}, "vocab_size is for a new tokenizer"),
        ({"tokenizer": Path("a"), "tokenizer_text_nbytes": 300}, "tokenizer_text_nbytes is for a new tokenizer"),
        ({"validation_seed": 1}, "validation_seed is for validation_fraction"),
        ({"max_documents": 0}, "max_documents 0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size 0 must be at least 1"),
        ({"end_of_text": "</s>"}, "end_of_text is for an existing tokenizer"),
        ({"split": "test"}, "split is for Hugging Face data sets"),
        ({"validation_split": "test"}, "validation_split is for Hugging Face data sets"),
    ],
)
def test_options_that_cannot_be_meant_are_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenizeConfig(**{"sources": ("a.txt",), "output": tmp_path, **changes})


def test_a_fraction_that_takes_nothing_or_all_is_an_error(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"1e-07 leaves none of the 200 documents for validation: choose another"):
        prepare(config_for(corpus, validation_fraction=1e-7))
    with pytest.raises(DataError, match=r"leaves none of the 200 documents for train"):
        prepare(config_for(corpus, validation_fraction=0.9999999, vocab_size=257))
    (corpus.parent / "blank.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"no text for .*all documents of .*blank\.jsonl are empty"):
        prepare(config_for(corpus.parent / "blank.jsonl", vocab_size=257))
