"""Choosing a few rows of a large table: greedy cover, for example of all pairs of values (pairwise testing).

Most faults need one value or two that meet, so rows in which every two values meet find them, in a tenth of the runs of
the whole product.
"""

from itertools import combinations, product


def rows_of(axes, allowed=lambda **_row: True):
    """Every row, as axis -> value, of the product of `axes` (axis -> values) that is `allowed`."""
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [row for row in rows if allowed(**row)]


def pairs_of(row):
    """Every two (axis, value) of a row."""
    return set(combinations(row.items(), 2))


def cover(rows, features=pairs_of):
    """Some of the rows, that together have every feature (a set for each row) that any row has."""
    missing, chosen = set().union(*map(features, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(features(row) & missing))
        missing -= features(best)
        chosen.append(best)
    return chosen
