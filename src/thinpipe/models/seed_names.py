"""Seed names: the parameter names from which initial weights are derived, kept stable when parameters are renamed.

The seed of an initial weight is derived from the run's seed and the parameter's name, so renaming a parameter would
change its initial weights. To prevent that, a commit that renames a parameter adds an entry to `SEED_NAMES` that maps
the new name to the old one.
"""

SEED_NAMES: dict[str, str] = {
    "projections": "necks",
    "token_prior": "anchors",
    "bigrams": "pairs",
    "up_projection": "entry",
    "down_projection": "exit",
    "up_project": "widen",
}
"""New name -> old name, for one or several whole dot-separated components: {"projections": "necks"} derives the seed of
`projections.1.weight` from `necks.1.weight`. If several entries match, the one with the most components applies."""


def seed_name(name: str, table: dict[str, str] = SEED_NAMES) -> str:
    """The seed name of a parameter."""
    parts, text = name.split("."), list[str]()
    lengths = sorted({new.count(".") + 1 for new in table}, reverse=True)
    while parts:
        length = next((length for length in lengths if ".".join(parts[:length]) in table), 0)
        text.append(table[".".join(parts[:length])] if length else parts[0])
        del parts[: max(length, 1)]
    return ".".join(text)
