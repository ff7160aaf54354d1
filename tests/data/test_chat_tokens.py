"""Which tokens of a chat are trained on: the assistant's words and what ends them, by every kind of template."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chat_tokenizers import TEMPLATES, make_tokenizer
from thinpipe.core.token_flags import BEGINS, ID_MASK, TRAINED
from thinpipe.data import DataError, Prepared, TokenizeConfig, Tokenizer, Tokens, prepare
from thinpipe.data.chat.trained_tokens import CHANGES_EARLIER_TURNS, MERGED_TOKENS

CHAT = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes, a small one."},
]
ENDS = {"chatml": "<|im_end|>", "marked": "<|im_end|>", "thinking": "<|im_end|>"} | {
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}
"""What ends a turn of the assistant."""


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    made: dict[str | None, Path] = {}

    def tokenizer(template: str | None) -> Path:
        if template not in made:
            made[template] = make_tokenizer(tmp_path_factory.mktemp(str(template)), template)
        return made[template]

    return tokenizer


def tokenized(folder: Path, tokenizer: Path, records: list[dict[str, Any]], **changes: Any) -> Prepared:
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = {"sources": (str(folder / "chats.jsonl"),), "output": folder / "out", "overwrite": True, **changes}
    return prepare(TokenizeConfig(chat=True, tokenizer=tokenizer, **given))


def pieces(folder: Path) -> list[list[tuple[str, bool]]]:
    """Of every chat: its text in runs of tokens that are, or are not, trained on."""
    tokens = Tokens(folder / "out" / "train")
    tokens.verify()
    backend = Tokenizer.load(folder / "out" / "tokenizer")
    flagged, starts = tokens.read(0, len(tokens)), tokens.chat_starts()
    found = []
    for start, stop in itertools.pairwise(starts.tolist()):
        chat = flagged[start:stop]
        assert (chat & BEGINS != 0).tolist() == [True] + [False] * (len(chat) - 1)
        trained = chat & TRAINED != 0
        edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(chat)]
        runs = itertools.pairwise(edges)
        found.append([(backend.decode((chat[a:b] & ID_MASK).tolist()), bool(trained[a])) for a, b in runs])
    return found


def trained_texts(folder: Path) -> list[list[str]]:
    return [[text for text, is_trained in chat if is_trained] for chat in pieces(folder)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_assistants_words_and_what_ends_them_are_trained_on(
    template: str, tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    prepared = tokenized(tmp_path, tokenizer_of(template), [{"messages": CHAT}])
    before = " " if template == "mistral" else ""  # which its template writes with the answer
    answers = [before + CHAT[turn]["content"] + ENDS[template] for turn in (1, 3)]
    assert trained_texts(tmp_path) == [answers]
    facts = prepared.train.chat
    assert (facts.train_on, facts.longest_chat) == ("assistant", prepared.train.tokens)
    assert facts.trained_tokens == sum((Tokens(tmp_path / "out" / "train").read(0, facts.longest_chat) & TRAINED) != 0)
    tokenized(tmp_path, tokenizer_of(template), [{"messages": CHAT}], train_on="completion")
    assert trained_texts(tmp_path) == [answers[1:]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_all_of_a_chat_is_what_the_template_renders(
    template: str, tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenized(tmp_path, tokenizer_of(template), [{"messages": CHAT}], train_on="all")
    theirs = AutoTokenizer.from_pretrained(tokenizer_of(template)).apply_chat_template(CHAT, tokenize=True)
    ours = Tokens(tmp_path / "out" / "train").read(0, len(theirs["input_ids"]))
    assert (ours & ID_MASK).tolist() == theirs["input_ids"]
    assert (ours & TRAINED != 0).tolist() == [False] + [True] * (len(ours) - 1)
    special = Tokenizer.load(tokenizer_of(template))
    assert special._backend.token_to_id(ENDS[template]) in (ours & ID_MASK).tolist()


def test_a_template_that_changes_earlier_turns_is_found_by_the_chat_it_changes(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    thinking = [CHAT[0], {"role": "assistant", "content": "<think>Fur.</think>A cat."}, *CHAT[2:]]
    records = [{"messages": thinking}, {"messages": CHAT}]
    prepared = tokenized(tmp_path, tokenizer_of("thinking"), records)
    assert dict(prepared.chats["train"].dropped) == {CHANGES_EARLIER_TURNS: 1}
    assert trained_texts(tmp_path) == [["A cat.<|im_end|>", "Yes, a small one.<|im_end|>"]]
    tokenized(tmp_path, tokenizer_of("thinking"), records, train_on="completion")
    assert trained_texts(tmp_path) == [["Yes, a small one.<|im_end|>"]] * 2
    assert "Fur." not in "".join(text for text, _ in pieces(tmp_path)[0])


def test_chats_are_left_out_for_counted_reasons_and_never_trained_on_as_a_whole(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    system = {"role": "system", "content": "Be brief."}
    records = [
        {"messages": [system, *CHAT]},
        {"messages": CHAT[:1]},
        {"messages": [*CHAT[:2], {"role": "user", "content": "So?"}]},
        {"messages": [CHAT[0], {"role": "assistant", "content": "   "}]},
        {"messages": [{"role": "narrator", "content": "Once."}]},
    ]
    prepared = tokenized(tmp_path, tokenizer_of("gemma"), records)
    assert dict(prepared.chats["train"].dropped) == {
        "the template refuses: System role not supported": 1,
        "no turn of the assistant": 1,
        "unknown role 'narrator'": 1,
    }
    assert trained_texts(tmp_path) == [["A cat.<end_of_turn>"], ["<end_of_turn>"]]
    assert prepared.train.documents == prepared.chats["train"].chats == 2


def test_words_that_merge_with_the_header_are_refused(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    """The header ends with a line's end, and two of them are a token of their own."""
    merging = [CHAT[0], {"role": "assistant", "content": "\n\nA cat."}]
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), [{"messages": merging}, {"messages": CHAT}])
    assert dict(prepared.chats["train"].dropped) == {MERGED_TOKENS: 1}


def test_the_text_format_is_trained_on_as_a_whole(tokenizer_of: Callable[[str | None], Path], tmp_path: Path) -> None:
    tokenized(tmp_path, tokenizer_of("chatml"), [{"text": "A cat."}, {"text": "<|im_start|>A cat.</s>"}])
    assert pieces(tmp_path) == [[("A", False), (" cat.</s>", True)], [("<|im_start|>", False), ("A cat.</s>", True)]]


def test_long_chats_are_cut_or_dropped_as_told(tokenizer_of: Callable[[str | None], Path], tmp_path: Path) -> None:
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    silent = {"messages": [{"role": "user", "content": "Why is that? " * 9}, {"role": "assistant", "content": "b"}]}
    records = [{"messages": CHAT}, short, silent]
    whole = tokenized(tmp_path, tokenizer_of("chatml"), records)
    assert whole.chats["train"].cut == 0
    length = len(Tokens(tmp_path / "out" / "train").read(*Tokens(tmp_path / "out" / "train").chat_starts()[:2]))
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), records, seq_len=length - 3)
    counts = prepared.chats["train"]
    assert (counts.chats, counts.cut, dict(counts.dropped)) == (
        2,
        1,
        {"nothing to train on before the cut at seq_len": 1},
    )
    assert prepared.train.chat.longest_chat == length - 2
    assert trained_texts(tmp_path)[0][0] == "A cat.<|im_end|>"
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), records, seq_len=length - 3, too_long="drop")
    counts = prepared.chats["train"]
    assert (counts.chats, counts.cut, dict(counts.dropped)) == (1, 0, {"longer than seq_len": 2})
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), records[:2], seq_len=length - 1, too_long="drop")
    assert prepared.chats["train"].chats == 2


def test_nothing_is_written_if_no_chat_can_be_trained_on(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    tokenized(tmp_path, tokenizer_of("chatml"), [{"messages": CHAT}])
    before = sorted(path.read_bytes() for path in (tmp_path / "out").rglob("*.*"))
    with pytest.raises(DataError, match=r"no chat of .* can be trained on: 2 no turn of the assistant"):
        tokenized(tmp_path, tokenizer_of("chatml"), [{"messages": CHAT[:1]}] * 2)
    assert before == sorted(path.read_bytes() for path in (tmp_path / "out").rglob("*.*"))


def test_the_hash_of_the_tokens_covers_template_flags_and_what_is_trained_on(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    def content(template: str, **changes: Any) -> str:
        return tokenized(tmp_path, tokenizer_of(template), [{"messages": CHAT}], **changes).train.content_sha256

    hashes = [content("chatml"), content("marked"), content("chatml", train_on="completion")]
    assert len({*hashes}) == 3
    assert content("chatml") == hashes[0]
    plain = content("chatml", train_on="all")
    assert plain not in hashes


def test_special_tokens_in_somebodys_words_are_counted(
    tokenizer_of: Callable[[str | None], Path], tmp_path: Path
) -> None:
    inserted = [{"role": "user", "content": "So</s> what?"}, CHAT[1]]
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), [{"messages": CHAT}, {"messages": inserted}])
    assert prepared.chats["train"].with_special_tokens == 1


def test_chats_for_validation(tokenizer_of: Callable[[str | None], Path], tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": str(n)}, CHAT[1]]} for n in range(40)]
    prepared = tokenized(tmp_path, tokenizer_of("chatml"), records, validation_fraction=0.3)
    sides = prepared.chats["train"].chats, prepared.chats["validation"].chats
    assert sum(sides) == 40
    assert 5 < sides[1] < 20
    assert Tokens(tmp_path / "out" / "validation").manifest.documents == sides[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat": True}, "chat needs a tokenizer"),
        ({"train_on": "all"}, "train_on is for chats"),
        ({"seq_len": 8}, "seq_len is for chats"),
        ({"chat": True, "tokenizer": Path("t"), "text_field": "chat"}, "text_field is for text"),
        ({"chat": True, "tokenizer": Path("t"), "too_long": "cut"}, "set seq_len, or leave too_long out"),
        ({"chat": True, "tokenizer": Path("t"), "seq_len": 0}, "seq_len 0 must be at least 1"),
    ],
)
def test_options_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenizeConfig(sources=("a",), output=Path("b"), **changes)


def test_a_tokenizer_without_a_template_is_refused(tokenizer_of: Callable[[str | None], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        tokenized(tmp_path, tokenizer_of(None), [{"messages": CHAT}])
