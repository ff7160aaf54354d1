"""Findings of `thinpipe doctor`, with their fixes, and the table that shows them."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

State = Literal["ok", "warning", "problem", "not checked"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "not checked": "dim"}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check."""

    what: str
    """Subject of the check, such as "torch" or "disk"."""
    state: State
    text: str
    fix: str = ""
    """What to do about it, one sentence; empty if nothing is to be done."""


def ok(what: str, text: str, fix: str = "") -> Finding:
    return Finding(what=what, state="ok", text=text, fix=fix)


def warning(what: str, text: str, fix: str) -> Finding:
    return Finding(what=what, state="warning", text=text, fix=fix)


def problem(what: str, text: str, fix: str) -> Finding:
    return Finding(what=what, state="problem", text=text, fix=fix)


def not_checked(what: str, text: str) -> Finding:
    return Finding(what=what, state="not checked", text=text)


def findings_table(findings: Sequence[Finding], *, fixes_below: bool = False) -> Table:
    """`fixes_below`: fixes stand below what was found, and not in a column beside it, which makes both narrow."""
    table = Table("", "what", "", box=None, pad_edge=False)
    for header in ("found",) if fixes_below else ("found", "to do"):
        table.add_column(header, overflow="fold")  # fold, not truncate: commands are to be copied
    for number, finding in enumerate(findings, start=1):
        state = Text(finding.state, style=_COLOURS[finding.state])
        if fixes_below:
            texts = [Text(f"{finding.text}\nTo do: {finding.fix}" if finding.fix else finding.text)]
        else:
            texts = [Text(finding.text), Text(finding.fix)]
        table.add_row(str(number), finding.what, state, *texts)
    return table
