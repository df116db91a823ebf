"""A small selection of all combinations of some settings: whatever two values of two settings are picked, one row has them both.

    rows = pairwise({"loss_type": ("grpo", "dapo"), "beta": (0.0, 0.04), "bf16": (False, True)})       # 4 of the 8 combinations

Most faults in a product of settings need two of them to meet, seldom three; all rows are for the night.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def product(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Every combination of one value for each name."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def named(row: Row, values: Mapping[str, Sequence[Any]]) -> str:
    """A row in words, for the id of a test: its first value, and what else is not as it stands first: "dapo-beta-bf16"."""
    first, *others = row
    return "-".join([str(row[first]), *(name for name in others if row[name] != values[name][0])])


def pairs(row: Row) -> set[tuple[Any, ...]]:
    """Every two settings of a row, with their values."""
    return set(itertools.combinations(row.items(), 2))


def pairwise(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Choose rows of the product until every pair of values stands in one of them: each time the first row with the most new pairs.

    The same choice at every call. For two names it is the product.
    """
    rows = product(values)
    bits: dict[tuple[Any, ...], int] = {}
    covers = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(row)) for row in rows]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: (covers[number] & missing).bit_count())
        chosen.append(rows[best])
        missing &= ~covers[best]
    return chosen
