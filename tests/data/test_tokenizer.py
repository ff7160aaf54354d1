"""Any text comes back exactly, training is repeatable, and other libraries read what is saved."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.conftest import random_text
from thinpipe.data import DataError, Tokenizer
from thinpipe.data.chunking import cut_into_pieces, group_by_size

TEXT = "It's 1984 in 東京.\r\n\n  naïve  café <|endoftext|> 🙂\x00\tend "


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0].tolist()


@settings(deadline=None, max_examples=300)
@given(text=st.text())
@example(text=TEXT)
@example(text="\ufeff \u2028\u0085\r\n\u180e e\u0301")
@example(text="")
def test_every_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocabulary.end_of_text_id not in ids


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=8))
def test_a_batch_equals_its_texts_one_by_one(tokenizer: Tokenizer, texts: list[str]) -> None:
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [encode(tokenizer, text) for text in texts]
    assert all(ids.dtype == np.uint32 for ids in batch)


@settings(deadline=None)
@given(text=st.text(alphabet="ab1.'s \n\r\t\u00a0é東", max_size=60), max_chars=st.integers(1, 20))
def test_pieces_join_to_the_text(text: str, max_chars: int) -> None:
    pieces = list(cut_into_pieces(text, max_chars))
    assert "".join(pieces) == text
    assert all(len(piece) <= max_chars for piece in pieces)


LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt2 and ours": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama 3": tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA_3_PATTERN), behavior="isolated"),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(deadline=None, max_examples=300)
@given(
    words=st.lists(st.text(alphabet="ab1.'s \n\r\t\u00a0é東\u180e\x1c", min_size=1, max_size=6), max_size=30),
    max_chars=st.integers(24, 60),
)
@example(words=["111", "11111", "11111", "111111", "111  "], max_chars=35)  # white space at the very end
def test_cutting_does_not_change_the_tokens(name: str, words: list[str], max_chars: int) -> None:
    """Compared before merging: equal parts give equal tokens with any merges."""
    text = " x ".join(words)  # a harmless place is then always near

    def parts(piece: str) -> list[str]:
        return [part for part, _ in PRE_TOKENIZERS[name].pre_tokenize_str(piece)]

    assert [part for piece in cut_into_pieces(text, max_chars) for part in parts(piece)] == parts(text)


def test_a_long_text_is_cut(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(40_000)
    monkeypatch.setattr("thinpipe.data.tokenizer.ENCODE_CHARS", 50_000)  # several calls for one text
    assert len(list(cut_into_pieces(text))) > 3
    assert tokenizer.decode(encode(tokenizer, text)) == text


@settings(deadline=None)
@given(st.lists(st.text(max_size=5)), st.integers(1, 12))
def test_groups_keep_order_and_size(items: list[str], max_size: int) -> None:
    groups = list(group_by_size(items, len, max_size))
    assert [item for group in groups for item in group] == items
    assert all(sum(map(len, group[:-1])) < max_size for group in groups)


def test_training_is_repeatable_in_another_process(tokenizer: Tokenizer) -> None:
    code = """
from tests.data.conftest import random_text
from thinpipe.data import Tokenizer
texts = [random_text(2000), "It's 1984.\\r\\n\\n  naïve café 東京 🙂"]
print(Tokenizer.train(texts, vocab_size=400).vocabulary.tokenizer_sha256)
"""
    command = [sys.executable, "-X", "utf8", "-c", code]
    for _ in range(2):
        output = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
        assert output.stdout.strip() == tokenizer.vocabulary.tokenizer_sha256


def test_vocabulary_is_exactly_as_asked(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocabulary.size, tokenizer.vocabulary.end_of_text_id) == (400, 0)
    with pytest.raises(DataError, match=r"vocab_size must be at least 257 .* not 256"):
        Tokenizer.train(["a"], vocab_size=256)
    with pytest.raises(DataError, match="too short for vocab_size 1,000: use more text, or at most 259"):
        Tokenizer.train(["aaaa"], vocab_size=1000)


def test_an_error_in_the_texts_is_not_lost() -> None:
    def texts() -> object:
        yield "a"
        raise DataError("line 7 is wrong")

    with pytest.raises(DataError, match="line 7 is wrong"):
        Tokenizer.train(texts(), vocab_size=257)


def test_loads_what_it_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.vocabulary == tokenizer.vocabulary
        assert encode(loaded, TEXT) == encode(tokenizer, TEXT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loaded.save(tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == before


def test_the_library_tokenizers_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = TEXT.replace("<|endoftext|>", "")
    assert theirs.encode(text).ids == encode(tokenizer, text)
    assert theirs.token_to_id("<|endoftext|>") == tokenizer.vocabulary.end_of_text_id


def test_transformers_reads_it_and_we_read_theirs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    tokenizer.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = TEXT.replace("<|endoftext|>", "")
    ids = encode(tokenizer, text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", tokenizer.vocabulary.end_of_text_id)
    assert len(theirs) == tokenizer.vocabulary.size
    theirs(["a", "longer than two"], padding=False, truncation=True, max_length=2)  # settings that it saves
    theirs.save_pretrained(tmp_path / "theirs")
    assert Tokenizer.load(tmp_path / "theirs").vocabulary == tokenizer.vocabulary


def test_settings_of_a_loaded_file_do_not_change_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(3)
    backend.enable_padding(length=50, pad_token="<|endoftext|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(path))
    loaded = Tokenizer.load(path)
    assert encode(loaded, TEXT) == encode(tokenizer, TEXT)
    assert loaded.vocabulary == tokenizer.vocabulary


def with_tokens(tokenizer: Tokenizer, folder: Path, *special: str) -> Path:
    """A saved tokenizer with more special tokens, and no other file."""
    tokenizer.save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(special))
    for path in folder.iterdir():
        path.unlink()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_end_of_text_of_a_loaded_folder(tokenizer: Tokenizer, tmp_path: Path, eos: object) -> None:
    folder = with_tokens(tokenizer, tmp_path, "<other>", "</s>")
    assert Tokenizer.load(folder).end_of_text == "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = Tokenizer.load(folder)
    assert (loaded.vocabulary.end_of_text_id, loaded.vocabulary.size) == (401, 402)
    assert loaded.vocabulary.tokenizer_sha256 != tokenizer.vocabulary.tokenizer_sha256
    assert Tokenizer.load(folder, "<other>").vocabulary.end_of_text_id == 400


def test_what_cannot_be_loaded_says_what_to_do(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist: name .*save_pretrained"):
        Tokenizer.load(tmp_path)
    folder = with_tokens(tokenizer, tmp_path, "</s>")
    with pytest.raises(DataError, match=r"no token '<eos>' .* set end_of_text to one of: <\|endoftext\|>, </s>"):
        Tokenizer.load(folder, "<eos>")
    for content in ("{", "{}", "[]", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer\.json .*cannot be read by the library tokenizers"):
            Tokenizer.load(tmp_path)
