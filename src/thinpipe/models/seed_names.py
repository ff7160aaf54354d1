"""The texts from which first weights are drawn: the names that parameters had when their numbers were first recorded.

A weight is drawn from the run's seed and a text. That text is the parameter's name, so one that is renamed would be
drawn anew, and every run would begin from other weights. Whoever renames a parameter adds a line to `SEED_NAMES`, so
that the text stays what it was.
"""

SEED_NAMES: dict[str, str] = {}
"""New name -> old name, of one or several whole components between dots: {"tables": "anchors"} draws
`necks.1.tables.weight` from the text `necks.1.anchors.weight`. Where several lines fit, the one with the most
components is taken."""


def seed_name(name: str, table: dict[str, str] = SEED_NAMES) -> str:
    """The text from which the parameter of this name is drawn."""
    parts, text = name.split("."), list[str]()
    lengths = sorted({new.count(".") + 1 for new in table}, reverse=True)
    while parts:
        length = next((length for length in lengths if ".".join(parts[:length]) in table), 0)
        text.append(table[".".join(parts[:length])] if length else parts[0])
        del parts[: max(length, 1)]
    return ".".join(text)
