"""Cuts a long text so that tokenizing it takes bounded memory and uses all cores, without changing the tokens.

Byte-level tokenizers (GPT-2, GPT-4, Llama 3 and ours) first split text by a pattern that always splits before a space
that is followed by something else than white space. Cutting there gives the same tokens as not cutting.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

MAX_PIECE_CHARS = 2**15


def cut_into_pieces(text: str, max_chars: int = MAX_PIECE_CHARS) -> Iterator[str]:
    """Pieces of at most `max_chars` that join to the text. Text without spaces is cut where it must be."""
    start = 0
    while len(text) - start > max_chars:
        end = _harmless_cut(text, start, start + max_chars) or start + max_chars
        yield text[start:end]
        start = end
    yield text[start:]


def group_by_size(items: Iterable[T], size: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """The items in order, in groups that reach `max_size` with their last item or end with the items."""
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


def _harmless_cut(text: str, start: int, limit: int) -> int | None:
    """The last place in start + 1 ... limit before such a space; looks back over half a piece only."""
    place = limit + 1
    while (place := text.rfind(" ", (start + limit) // 2 + 1, place)) != -1:
        following = text[place + 1 : place + 2]
        if following and not following.isspace():  # spaces at the end of a text belong together
            return place
    return None
