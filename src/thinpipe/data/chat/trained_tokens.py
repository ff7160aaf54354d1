"""Which tokens of a chat are trained on: by the marks of the template, or by rendering the chat up to each turn.

Without marks, what the assistant writes in a turn is what a rendering with the turn has more than one that asks the
assistant for it. This is checked for every chat: the shorter rendering has to be a prefix of the longer one, in text
and in tokens. A chat that fails is refused. It is never trained on as a whole instead.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinpipe.config.data import TrainOn
from thinpipe.data.chat.formats import Chat, UnusableChatError
from thinpipe.data.chat.template import ChatTemplate

Flags = npt.NDArray[np.bool_]

CHANGES_EARLIER_TURNS = (
    "the template changes earlier turns when another follows (--train-on completion trains on the last turn alone)"
)
NO_PREFIX = "what comes before an answer is rendered otherwise with the answer"
MERGED_TOKENS = "a token reaches over the border between an answer and what is before or after it"
NO_ANSWER = "no turn of the assistant"


def encode_chat(chat: Chat, template: ChatTemplate, train_on: TrainOn) -> tuple[list[int], Flags]:
    """Ids of the chat, and which are trained on. Raises UnusableChatError."""
    if chat.text is not None:
        ids = template.encode_text(chat.text)
        return ids, np.ones(len(ids), np.bool_)
    if train_on == "all":
        ids = template.encode(template.render(chat.messages, chat.tools))
        return ids, np.ones(len(ids), np.bool_)
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise UnusableChatError(NO_ANSWER)
    if template.has_marks(chat.tools):
        ids, marked = template.encode_marked(chat.messages, chat.tools)
        return ids, marked if train_on == "assistant" else _last_run(marked)
    return _encode_by_prefixes(chat, template, train_on)


def _last_run(marked: Flags) -> Flags:
    """The last unbroken run of marked tokens alone."""
    places = np.flatnonzero(marked)
    if not len(places):
        return marked
    gaps = np.flatnonzero(np.diff(places) > 1)
    last = np.zeros_like(marked)
    last[places[gaps[-1] + 1 if len(gaps) else 0] : places[-1] + 1] = True
    return last


def _encode_by_prefixes(chat: Chat, template: ChatTemplate, train_on: TrainOn) -> tuple[list[int], Flags]:
    rendered = template.render(chat.messages, chat.tools)
    ids = template.encode(rendered)
    trained = np.zeros(len(ids), np.bool_)
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    for turn in turns if train_on == "assistant" else turns[-1:]:
        before = template.render(chat.messages[:turn], chat.tools, add_generation_prompt=True)
        after = template.render(chat.messages[: turn + 1], chat.tools)
        if not rendered.startswith(after):
            raise UnusableChatError(CHANGES_EARLIER_TURNS)
        if not after.startswith(before):
            raise UnusableChatError(NO_PREFIX)
        begin = _tokens_of_prefix(before, ids, template)
        end = len(ids) if after == rendered else _tokens_of_prefix(after, ids, template)
        trained[begin : _end_of_words(ids, begin, end, template)] = True
    return ids, trained


def _tokens_of_prefix(prefix: str, ids: Sequence[int], template: ChatTemplate) -> int:
    """Number of tokens of the prefix, with which the whole begins."""
    found = template.encode(prefix)
    if list(ids[: len(found)]) != found:
        raise UnusableChatError(MERGED_TOKENS)
    return len(found)


def _end_of_words(ids: Sequence[int], begin: int, end: int, template: ChatTemplate) -> int:
    """The end of a turn without the white space that templates write after its last special token: nobody asks the
    assistant for it."""
    last = end
    while last > begin and not template.is_special(ids[last - 1]) and not template.decode(ids[last - 1 : last]).strip():
        last -= 1
    return last if last > begin and template.is_special(ids[last - 1]) else end
