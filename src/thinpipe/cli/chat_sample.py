"""Shows one chat with the tokens that are trained on in colour, or between marks where there is no colour; and sums up
what became of all chats."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from thinpipe.data import ChatCounts

_TRAINED_STYLE, _OTHER_STYLE = "black on green", "dim"
MARKS = "{+", "+}"
"""Before and after tokens that are trained on, without colour; git's for what is added."""


def show_chat(pieces: Sequence[tuple[str, bool]], console: Console | None = None) -> None:
    """Prints a chat. `pieces`: its text in parts, and whether each is trained on."""
    console = console or Console(highlight=False)
    has_colour = console.color_system is not None
    shown = Text("The first chat. Trained on is ")
    _append(shown, "what looks like this" if has_colour else "this", is_trained=True, has_colour=has_colour)
    shown.append(":\n")
    for text, is_trained in pieces:
        _append(shown, printable(text, console.encoding), is_trained=is_trained, has_colour=has_colour)
    console.print(shown, soft_wrap=True)


def _append(shown: Text, text: str, *, is_trained: bool, has_colour: bool) -> None:
    if has_colour:
        shown.append(text, _TRAINED_STYLE if is_trained else _OTHER_STYLE)
    else:
        shown.append(f"{MARKS[0]}{text}{MARKS[1]}" if is_trained else text)


def printable(text: str, encoding: str) -> str:
    """Text of a data set as a terminal may be given it: without codes that move its cursor or change its title."""
    visible = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def describe_chats(counts: ChatCounts) -> list[str]:
    """Lines about one side of the split."""
    share = counts.trained_tokens / counts.tokens
    lines = [
        f"{counts.chats:,} chats, {counts.tokens:,} tokens, {counts.trained_tokens:,} of them trained on ({share:.1%})"
    ]
    if counts.cut:
        lines.append(f"{counts.cut:,} were cut at seq_len")
    if counts.with_special_tokens:
        lines.append(
            f"{counts.with_special_tokens:,} hold the text of special tokens in their words: it became those tokens"
        )
    lines += [
        f"{count:,} left out: {reason}" for reason, count in sorted(counts.dropped.items(), key=lambda item: -item[1])
    ]
    return lines
