"""Chats of the five usual formats, found by the fields of a record, as the messages that chat templates take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinpipe.core.errors import DataError

Fields = Mapping[str, Any]
Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of templates by the names that data sets use."""


class UnusableChatError(Exception):
    """The chat cannot be trained on; the text is the reason, by which such chats are counted."""


@dataclass(frozen=True)
class Chat:
    """A conversation, or a text without turns."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    """Descriptions of the tools that the assistant may call."""
    text: str | None = None
    """A text that is trained on as it is. None: the messages are the chat."""


def chat_of(fields: Fields, where: str) -> Chat:
    """The chat of a record. Raises DataError, which names the place, if the record is of no known format, and
    UnusableChatError for a chat that no template can render."""
    for needed, convert in FORMATS.values():
        if all(fields.get(name) is not None for name in needed):
            return convert(fields, where)
    known = "; ".join(f"{', '.join(needed)}" for needed, _ in FORMATS.values())
    there = ", ".join(name for name, value in fields.items() if value is not None) or "none"
    raise DataError(f"{where}: no chat in the fields {there}; there must be: {known}")


def _from_messages(fields: Fields, where: str) -> Chat:
    messages = [_message(turn, where, "messages") for turn in _turns(fields["messages"], where, "messages")]
    return _chat(messages, fields)


def _from_conversations(fields: Fields, where: str) -> Chat:
    turns = _turns(fields["conversations"], where, "conversations")
    messages = [_message(turn, where, "conversations") for turn in turns]
    return _chat([*_system(fields, where), *messages], fields)


def _from_prompt(fields: Fields, where: str) -> Chat:
    messages = _system(fields, where)
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(fields[name], str):
            messages.append({"role": role, "content": _text(fields, name, where)})
        else:
            messages += [_message(turn, where, name) for turn in _turns(fields[name], where, name)]
    return _chat(messages, fields)


def _from_instruction(fields: Fields, where: str) -> Chat:
    asked = _text(fields, "instruction", where)
    if fields.get("input"):
        asked = f"{asked}\n\n{_text(fields, 'input', where)}"
    answer = {"role": "assistant", "content": _text(fields, "output", where)}
    return _chat([*_system(fields, where), {"role": "user", "content": asked}, answer], fields)


def _from_text(fields: Fields, where: str) -> Chat:
    text = _text(fields, "text", where)
    if not text:
        raise UnusableChatError("empty")
    return Chat(text=text)


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Fields, str], Chat]]] = {
    "messages": (("messages",), _from_messages),
    "conversations": (("conversations",), _from_conversations),
    "prompt and completion": (("prompt", "completion"), _from_prompt),
    "instruction and output": (("instruction", "output"), _from_instruction),
    "text": (("text",), _from_text),
}
"""By name: the fields that a record of this format has, and its conversion. The first whose fields are there counts."""


def _chat(messages: list[Message], fields: Fields) -> Chat:
    if not messages:
        raise UnusableChatError("empty")
    tools = fields.get("tools")
    return Chat(messages=tuple(messages), tools=tuple(tools) if isinstance(tools, list) else ())


def _system(fields: Fields, where: str) -> list[Message]:
    """The system message of formats that have it in a field of its own."""
    name = "system" if fields.get("system") else "system_prompt"
    return [{"role": "system", "content": _text(fields, name, where)}] if fields.get(name) else []


def _turns(value: Any, where: str, name: str) -> list[Fields]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise DataError(f"{where}: '{name}' is no list of objects; write one object for each turn")
    return value


def _message(turn: Fields, where: str, name: str) -> Message:
    """The turn as templates know it. Columns that a table has filled with null are left out."""
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise DataError(f"{where}: a turn of '{name}' has neither role and content nor from and value")
    if role not in _ROLES:
        raise UnusableChatError(f"unknown role {role[:40]!r}")
    others = {
        key: value
        for key, value in turn.items()
        if key not in ("role", "from", "content", "value") and value is not None
    }
    return {"role": _ROLES[role], "content": _content(content), **others}


def _content(content: Any) -> str:
    """Words of a turn; of one that only calls tools, none."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UnusableChatError("content that is not text")
    return _without_half_pairs(content)


def _text(fields: Fields, name: str, where: str) -> str:
    if not isinstance(fields[name], str):
        raise DataError(f"{where}: '{name}' is {type(fields[name]).__name__}, not text")
    return _without_half_pairs(fields[name])


def _without_half_pairs(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableChatError("half of a surrogate pair, which is no character") from None
    return text
