"""Cuts long texts into pieces without changing their tokens, so that tokenizing takes bounded memory and all cores.

The pre-tokenizers of byte-level tokenizers (GPT-2, GPT-4, Llama 3 and thinpipe's) always split before a space that is
followed by a non-space character. Cutting there gives the same tokens as not cutting.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

MAX_PIECE_CHARS = 2**15


def cut_into_pieces(text: str, max_chars: int = MAX_PIECE_CHARS) -> Iterator[str]:
    """Pieces of at most `max_chars` characters whose concatenation is the text. Text without a suitable space is cut at
    `max_chars`, which may change tokens."""
    start = 0
    while len(text) - start > max_chars:
        end = _token_safe_cut(text, start, start + max_chars) or start + max_chars
        yield text[start:end]
        start = end
    yield text[start:]


def group_by_size(items: Iterable[T], size: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """The items in order, in groups that end with the item that makes their total size reach `max_size`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= max_size:
            yield group
            group, total = [], 0
    if group:
        yield group


def _token_safe_cut(text: str, start: int, limit: int) -> int | None:
    """The last index in start + 1 ... limit at a space followed by a non-space character; searches the last half of the
    piece only. None if there is none."""
    place = limit + 1
    while (place := text.rfind(" ", (start + limit) // 2 + 1, place)) != -1:
        following = text[place + 1 : place + 2]
        if following and not following.isspace():  # pre-tokenizers keep a run of white space together
            return place
    return None
