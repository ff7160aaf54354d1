"""Every kind of source gives its documents exactly and in order, and every error names the place and the remedy."""

import json
import sys
from pathlib import Path

import pytest

from thinpipe.core.errors import UserError
from thinpipe.data import DataError, open_sources

TEXTS = ["first\r\nline", "zweiter Text: ü\n", "third 🙂"]


def texts_of(*specs: object, **kwargs: str) -> list[str]:
    return [document.text for document in open_sources([str(spec) for spec in specs], **kwargs).documents()]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_parquet(path: Path, texts: list[object], column: str = "text") -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(arrow.table({"title": ["t"] * len(texts), column: texts}), path, row_group_size=2)
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\ntwo 🙂\n".encode())
    assert texts_of(path) == ["one\r\n\ntwo 🙂\n"]


def test_separator_lines_cut_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.TXT"
    path.write_bytes(b"\xef\xbb\xbfone\n<|endoftext|>\n<|endoftext|>\r\ntwo <|endoftext|> three\n<|endoftext|>\nlast")
    source = open_sources([str(path)])
    assert texts_of(path) == ["one\n", "two <|endoftext|> three\n", "last"]
    assert sum(document.read_nbytes for document in source.documents()) <= path.stat().st_size


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n")
    assert texts_of(path) == TEXTS
    assert texts_of(write_jsonl(tmp_path / "b.jsonl", TEXTS, "body"), field="body") == TEXTS


def test_parquet(tmp_path: Path) -> None:
    many = [f"text {number}" for number in range(1000)]
    assert texts_of(write_parquet(tmp_path / "a.parquet", [*many, ""])) == many
    assert texts_of(write_parquet(tmp_path / "b.parquet", TEXTS, "body"), field="body") == TEXTS


def test_folders_and_globs_come_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "B.txt", "a10.txt", "a2.txt", "sub/c.txt", ".hidden.txt", ".cache/d.txt", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    write_jsonl(tmp_path / "z.jsonl", ["z"])
    assert texts_of(tmp_path) == ["B.txt", "a10.txt", "a2.txt", "b.txt", "sub/c.txt", "z"]
    assert texts_of(tmp_path / "a*.txt") == ["a10.txt", "a2.txt"]
    assert texts_of(tmp_path / "**" / "c.txt", tmp_path / "b.txt") == ["sub/c.txt", "b.txt"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    assert texts_of(tmp_path / "a[1].txt") == ["brackets"]


def test_sizes_and_description(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1234")
    write_jsonl(tmp_path / "b.jsonl", ["z"])
    source = open_sources([str(tmp_path), str(tmp_path / "a.txt")])
    assert source.total_nbytes == 4 + (tmp_path / "b.jsonl").stat().st_size + 4
    assert source.description == f"{tmp_path}, {tmp_path / 'a.txt'}"
    assert open_sources([str(tmp_path), "hf:name:config"]).total_nbytes is None
    assert open_sources(["hf:name:config"], split="test").description == "hf:name:config (test)"
    for kind in (tmp_path / "a.txt", tmp_path / "b.jsonl"):
        part = open_sources([str(kind)])
        assert sum(document.read_nbytes for document in part.documents()) == part.total_nbytes


def test_progress_through_parquet_never_exceeds_the_file(tmp_path: Path) -> None:
    source = open_sources([str(write_parquet(tmp_path / "a.parquet", [f"text {i}" for i in range(100)]))])
    total = source.total_nbytes
    assert total is not None
    assert 0.9 * total < sum(document.read_nbytes for document in source.documents()) <= total


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON \(Expecting value at column"),
        (b'{"text": "a"}\n\n[1]\n', r'a\.jsonl, line 3: not an object; write {"text"'),
        (b'{"body": "a", "id": 3}\n', r"line 1: no field 'text'; there are: body, id\. Name the one"),
        (b"{}\n", r"line 1: no field 'text'; there are: none"),
        (b'{"text": null}\n', r"line 1: 'text' is null, not text; drop this record or name another field"),
        (b'{"text": 5}\n', r"line 1: 'text' is int"),
        (b'{"text": "caf\xe9"}\n', r"line 1: byte 0xe9 is not UTF-8 .* convert the file"),
        (rb'{"text": "\ud83d"}', r"line 1: 'text' holds '\\ud83d', half of a surrogate pair"),
    ],
)
def test_errors_in_jsonl(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts_of(tmp_path / "a.jsonl")


def test_errors_in_text_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n<|endoftext|>\ntwo\nthree\nf\xfcnf\n")
    with pytest.raises(DataError, match=r"a\.txt, line 5: byte 0xfc is not UTF-8"):
        texts_of(tmp_path / "a.txt")


def test_errors_in_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: no field 'text'; there are: title, body"):
        texts_of(write_parquet(tmp_path / "a.parquet", TEXTS, "body"))
    with pytest.raises(DataError, match=r"b\.parquet, row 3: 'text' is null"):
        texts_of(write_parquet(tmp_path / "b.parquet", ["a", "b", None]))
    with pytest.raises(DataError, match=r"c\.parquet, row 1: 'text' is int"):
        texts_of(write_parquet(tmp_path / "c.parquet", [1, 2]))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"d\.parquet: not a readable Parquet file .* download it again"):
        texts_of(tmp_path / "d.parquet")


def test_errors_in_specs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "a.csv", r"a\.csv: cannot read this kind of file; use \.txt, \.jsonl, \.parquet files"),
        (tmp_path / "empty", r"empty has no file that can be read: \.txt, \.jsonl, \.parquet"),
        (tmp_path / "*.txt", r"\*\.txt' is no file or folder, and matches none"),
        ("wikitext", r"'wikitext' is no file .* write hf:NAME"),
        ("hf:", r"names no data set: write hf:NAME"),
    ]
    for spec, message in cases:
        with pytest.raises(DataError, match=message):
            open_sources([str(spec)])


def test_missing_libraries_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'needs pyarrow: pip install "thinpipe\[parquet\]"'):
        texts_of(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r'hf:name needs datasets: pip install "thinpipe\[hf\]"'):
        texts_of("hf:name")


class TestHuggingFace:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # not the user's
        write_parquet(tmp_path / "hub" / "train.parquet", [*TEXTS, ""])
        write_parquet(tmp_path / "hub" / "test.parquet", ["held out"])
        return tmp_path / "hub"

    def test_reads_the_split(self, folder: Path) -> None:
        assert texts_of(f"hf:{folder}") == TEXTS
        assert texts_of(f"hf:{folder}", split="test") == ["held out"]

    def test_errors(self, folder: Path) -> None:
        with pytest.raises(DataError, match=r"split nope: Bad split.*Check the name"):
            texts_of(f"hf:{folder}", split="nope")
        with pytest.raises(DataError, match=r"split train, row 1: no field 'body'; there are: title, text"):
            texts_of(f"hf:{folder}", field="body")
        with pytest.raises(DataError, match=r"Check the name"):
            texts_of(f"hf:{folder / 'missing'}")
