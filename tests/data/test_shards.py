"""What is written is what is read, whatever the file size; what was changed, cut off or made by others is refused."""

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import VOCABULARY
from thinpipe.data import DataError, ShardWriter, Tokens, Vocabulary

MakeTokens = Callable[..., Tokens]


def write(folder: Path, documents: list[list[int]], vocabulary: Vocabulary = VOCABULARY, **kwargs: Any) -> Tokens:
    with ShardWriter(folder, vocabulary, source="lists", **kwargs) as writer:
        for ids in documents:
            writer.add(np.array(ids, np.uint32), text_nbytes=10 * len(ids))
        manifest = writer.finish()
    tokens = Tokens(folder)
    assert tokens.manifest == manifest
    return tokens


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=30), min_size=1, max_size=10),
    max_shard_tokens=st.integers(1, 60),
    data=st.data(),
)
def test_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], max_shard_tokens: int, data: st.DataObject
) -> None:
    tokens = write(tmp_path_factory.mktemp("tokens"), documents, max_shard_tokens=max_shard_tokens)
    expected = [token for document in documents for token in (*document, 0)]
    tokens.verify()
    assert tokens.read(0, len(tokens)).tolist() == expected
    assert [entry.tokens for entry in tokens.manifest.shards[:-1]] == [max_shard_tokens] * (
        len(tokens.manifest.shards) - 1
    )
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert tokens.read(start, stop).tolist() == expected[start:stop]


def test_the_manifest_tells_everything(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [4]], max_shard_tokens=4)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    hashes = [entry.pop("sha256") for entry in manifest["shards"]]
    assert manifest == {
        "format_version": 1,
        "dtype": "uint16",
        "vocabulary": {"size": 1000, "end_of_text_id": 0, "tokenizer_sha256": "0" * 64},
        "documents": 2,
        "text_nbytes": 40,
        "source": "lists",
        "shards": [{"file": "shard-00000.bin", "tokens": 4}, {"file": "shard-00001.bin", "tokens": 2}],
    }
    assert len(set(hashes)) == 2
    assert (tmp_path / "shard-00000.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 0, 0])


@pytest.mark.parametrize(("size", "dtype", "nbytes"), [(2**16, "uint16", 2), (2**16 + 1, "uint32", 4)])
def test_ids_take_two_bytes_while_the_vocabulary_fits(tmp_path: Path, size: int, dtype: str, nbytes: int) -> None:
    vocabulary = Vocabulary(size=size, end_of_text_id=size - 1, tokenizer_sha256="0" * 64)
    tokens = write(tmp_path, [[0, size - 1]], vocabulary)
    assert tokens.manifest.dtype == dtype
    assert (tmp_path / "shard-00000.bin").stat().st_size == 3 * nbytes
    assert tokens.read(0, 3).tolist() == [0, size - 1, size - 1]


def test_bits_per_byte(make_tokens: MakeTokens) -> None:
    manifest = make_tokens(50).manifest
    assert manifest.text_bytes_per_token == 3.0
    assert manifest.bits_per_byte(math.log(2) * 6) == pytest.approx(2.0)


def test_the_content_has_a_name(make_tokens: MakeTokens) -> None:
    one, same, other = make_tokens(50, name="a"), make_tokens(50, name="b"), make_tokens(51, name="c")
    assert one.manifest.content_sha256 == same.manifest.content_sha256 != other.manifest.content_sha256


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="id 1000 is not in a vocabulary of 1000"):
        write(tmp_path, [[1, 1000]])
    with pytest.raises(ValueError, match="end_of_text_id 5"):
        Vocabulary(size=5, end_of_text_id=5, tokenizer_sha256="0" * 64)


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text for"):
        write(tmp_path, [])


def test_an_error_while_writing_leaves_nothing_to_open(tmp_path: Path) -> None:
    def write_half() -> None:
        with ShardWriter(tmp_path, VOCABULARY, source="", max_shard_tokens=4) as writer:
            writer.add(np.arange(6, dtype=np.uint32), text_nbytes=1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-00000.bin", "shard-00001.bin"]
    with pytest.raises(
        DataError, match=r"no finished tokens .*thinpipe tokenize --output .*again if that was interrupted"
    ):
        Tokens(tmp_path)
    assert write(tmp_path, [[7]]).read(0, 2).tolist() == [7, 0]


def test_finished_tokens_are_not_overwritten(make_tokens: MakeTokens) -> None:
    make_tokens(50)
    with pytest.raises(DataError, match="already holds finished tokens: choose another folder"):
        make_tokens(60)


def test_a_cut_off_shard_is_refused_at_once(make_tokens: MakeTokens) -> None:
    path = make_tokens(250).folder / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard-00001.bin has 199 bytes where the manifest says 200: copy the folder"):
        Tokens(path.parent)
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00001.bin is missing"):
        Tokens(path.parent)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_one_changed_bit_is_found_by_verify(make_tokens: MakeTokens, shard: int) -> None:
    path = make_tokens(250).folder / f"shard-0000{shard}.bin"
    data = bytearray(path.read_bytes())
    data[17] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path.name} has changed since it was written"):
        Tokens(path.parent).verify()


def test_verify_tells_how_far_it_is(make_tokens: MakeTokens) -> None:
    calls: list[tuple[str, int | None]] = []
    advanced: list[int] = []

    @contextmanager
    def progress(label: str, total_nbytes: int | None) -> Any:
        calls.append((label, total_nbytes))
        yield advanced.append

    make_tokens(250).verify(progress)
    assert calls == [("verifying", 500)]
    assert advanced == [200, 200, 100]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format_version": 3},
            "has format version 3, and this thinpipe reads versions 1 and 2: prepare the tokens again",
        ),
        ({"format_version": 3, "dtype": "uint64"}, "has format version 3"),
        ({"format_version": 2}, r"is damaged .*format version 2 with tokens of uint16, chats: False"),
        ({"format_version": "1"}, "is damaged"),
        ({"dtype": "uint64"}, r"is damaged .*uint64"),
        ({"documents": -1}, r"is damaged .*documents"),
        ({"shards": []}, r"is damaged .*shards"),
        ({"shards": [{"file": "../shard-00000.bin", "tokens": 1, "sha256": "0" * 64}]}, r"is damaged .*file"),
        ({"vocabulary": {"size": 5, "end_of_text_id": 9, "tokenizer_sha256": "0" * 64}}, r"is damaged .*end_of_text"),
        ({"unknown": 1}, r"is damaged .*unknown"),
    ],
)
def test_a_wrong_manifest_is_refused(make_tokens: MakeTokens, change: dict[str, Any], message: str) -> None:
    path = make_tokens(50).folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        Tokens(path.parent)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        Tokens(folder)


def test_a_manifest_cut_anywhere_is_refused(make_tokens: MakeTokens) -> None:
    path = make_tokens(50).folder / "manifest.json"
    data = path.read_bytes()
    for length in range(0, len(data) - 2, 7):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="is damaged"):
            Tokens(path.parent)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 51), (7, 6)])
def test_reading_outside_is_refused(make_tokens: MakeTokens, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=r"0 \.\.\. 49"):
        make_tokens(50).read(start, stop)
