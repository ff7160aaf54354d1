"""The chat template of a tokenizer: renders conversations, and tells which tokens the assistant writes.

transformers renders, with the tokenizer's own template. Special tokens of the rendered text become their ids, unlike
those in the documents of `data.tokenizer`.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinpipe.core.errors import DataError
from thinpipe.core.extras import require_extra
from thinpipe.data.chat.formats import Message, UnusableChatError

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MAX_REASON_CHARS = 120


class ChatTemplate:
    """Template and tokenizer of a folder. Raises DataError if it has none."""

    def __init__(self, path: Path) -> None:
        require_extra("transformers", extra="hf", feature="tokenize --chat")
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging

        folder = path if path.is_dir() else path.parent
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            # The class that does nothing but read the files: it runs no code of the folder, and keeps the ids of
            # tokenizer.json, from which `data.tokenizer` takes the vocabulary.
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises anything for files that it cannot read
            raise DataError(f"{folder}: transformers cannot read this tokenizer ({_first_line(error)})") from error
        finally:
            logging.set_verbosity(verbosity)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): name "
                "the tokenizer of a model that was tuned for chats, or add the template that the model shall have"
            )
        self.sha256 = hashlib.sha256(json.dumps(self._tokenizer.chat_template, sort_keys=True).encode()).hexdigest()
        """Hash of the template's text."""

    def has_marks(self, tools: Sequence[Any]) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return _GENERATION_MARK.search(self._tokenizer.get_chat_template(tools=list(tools) or None)) is not None

    def holds_special_tokens(self, messages: Sequence[Message]) -> bool:
        """Whether somebody's words hold the text of a special token, which then becomes that token."""
        texts = self._tokenizer.all_special_tokens
        return any(text in str(message["content"]) for message in messages for text in texts)

    def render(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation; with `add_generation_prompt` as the assistant finds it before it answers."""
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt))

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text. Nothing is added: the template has written what belongs there."""
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without turns: as the tokenizer begins one, and with its end-of-sequence token at the end. A
        text that was rendered already has both."""
        begin, end = self._tokenizer.bos_token, self._tokenizer.eos_token_id
        has_begin = begin is not None and text.startswith(begin)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not has_begin)["input_ids"]
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def encode_marked(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[int], np.ndarray]:
        """Ids of a conversation, and which of them the template marks."""
        found = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), np.array(found["assistant_masks"], np.bool_)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def is_special(self, token: int) -> bool:
        return token in self._tokenizer.added_tokens_decoder

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=list(tools) or None, **options
            )
        except Exception as error:  # a template is code: it refuses what it does not know by any exception
            raise UnusableChatError(f"the template refuses: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:_MAX_REASON_CHARS]
