"""Chats of the usual formats become the same messages, and what is no chat is named."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from thinpipe.data import DataError, open_sources
from thinpipe.data.chat.formats import FORMATS, UnusableChatError, chat_of

TURNS = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."})
RECORDS = {
    "messages": {"messages": list(TURNS)},
    "conversations": {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]},
    "prompt and completion": {"prompt": "What?", "completion": "That."},
    "instruction and output": {"instruction": "What?", "input": "", "output": "That."},
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_gives_the_same_messages(name: str) -> None:
    assert chat_of(RECORDS[name], "here").messages == TURNS
    assert {*RECORDS, "text"} == {*FORMATS}


def test_a_text_has_no_turns() -> None:
    found = chat_of({"text": "Once."}, "here")
    assert (found.text, found.messages) == ("Once.", ())


def test_the_input_of_an_instruction_and_system_messages_in_fields_of_their_own() -> None:
    fields = {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert [(turn["role"], turn["content"]) for turn in chat_of(fields, "here").messages] == [
        ("system", "Be brief."),
        ("user", "Add.\n\n1 2"),
        ("assistant", "3"),
    ]
    fields = {"system_prompt": "Be brief.", "conversations": RECORDS["conversations"]["conversations"]}
    assert chat_of(fields, "here").messages[0] == {"role": "system", "content": "Be brief."}


def test_prompts_may_be_messages() -> None:
    assert chat_of({"prompt": [TURNS[0]], "completion": [TURNS[1]]}, "here").messages == TURNS


def test_parts_of_text_tool_calls_and_columns_of_null() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    fields = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"}],
                "name": None,
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "function", "content": "3", "tool_calls": None},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "text": None,
    }
    found = chat_of(fields, "here")
    assert found.messages == (
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    )
    assert found.tools == ({"type": "function", "function": {"name": "add"}},)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"text": ""}, "empty"),
        ({"messages": [{"role": "narrator", "content": "So."}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content that is not text"),
        ({"prompt": "a", "completion": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_chats_that_no_template_can_render(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UnusableChatError, match=reason):
        chat_of(fields, "here")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            "here: no chat in the fields question, answer; there must be: messages; conv",
        ),
        ({"messages": "a"}, "here: 'messages' is no list of objects"),
        ({"conversations": [{"speaker": "a"}]}, "a turn of 'conversations' has neither role and content nor from"),
        ({"instruction": "a", "output": 3}, "here: 'output' is int, not text"),
    ],
)
def test_what_is_no_chat_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        chat_of(fields, "here")


def test_the_same_records_from_every_kind_of_file(tmp_path: Path) -> None:
    records = [{"messages": list(TURNS)}, {"messages": [TURNS[0]]}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for suffix, first in (("jsonl", "line 1"), ("json", "entry 1"), ("parquet", "row 1")):
        found = list(open_sources([str(tmp_path / f"a.{suffix}")], chats=True).documents())
        assert [json.loads(document.text) for document in found] == records
        assert found[0].where == f"{tmp_path / f'a.{suffix}'}, {first}"
        assert all(document.read_nbytes > 0 for document in found)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"a": 1}', "not an array of objects"),
        ("a.json", "[1,", "a.json, line 1: not JSON"),
        ("a.jsonl", "[1]", "a.jsonl, line 1: not an object; write"),
        ("a.txt", "words", "cannot read this kind of file; use .jsonl, .json, .parquet files"),
    ],
)
def test_files_of_no_chats(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(open_sources([str(tmp_path / name)], chats=True).documents())
    with pytest.raises(DataError, match="text without turns"):
        open_sources(["sample:train"], chats=True)
