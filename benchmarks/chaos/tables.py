"""Rows of a table of the page."""

from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(names: Sequence[str]) -> list[str]:
    """The first column is words, the others are numbers."""
    return [row(names), row(["---", *["---:"] * (len(names) - 1)])]
