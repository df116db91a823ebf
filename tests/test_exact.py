"""Dataclasses as JSON data and back: whatever the hints allow comes back equal, and nothing else is written or read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscope.exact import read, written


class Colour(StrEnum):
    RED = "red"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Leaf:
    text: str
    value: float | None
    many: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """Every kind of hint that there is."""

    whole: int
    yes: bool
    colour: Colour
    leaf: Leaf | None
    pairs: tuple[tuple[int, str], ...]
    grid: tuple[tuple[float, ...], ...] | None
    named: Mapping[str, tuple[int, int]]
    anything: dict[str, Any] = field(default_factory=dict)
    either: float | str | None = None
    inner: tuple[Tree, ...] = ()
    numbered: Mapping[int, str] = field(default_factory=dict)


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
)
LEAVES = st.builds(Leaf, st.text(), st.none() | FLOATS, st.lists(FLOATS).map(tuple))
TREES = st.builds(
    Tree, st.integers(), st.booleans(), st.sampled_from(Colour), st.none() | LEAVES,
    st.lists(st.tuples(st.integers(), st.text())).map(tuple), st.none() | st.lists(st.lists(FLOATS).map(tuple)).map(tuple),
    st.dictionaries(st.text(), st.tuples(st.integers(), st.integers())), st.dictionaries(st.text(), JSON), st.none() | FLOATS | st.text(),
    numbered=st.dictionaries(st.integers(), st.text()),
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Are two values equal and of one type, all the way down, and NaN where the other one is?"""
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return type(b) is float and ((math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b)))
    return a == b and (type(a) is type(b) or isinstance(a, str))  # of an enum that stands for a text, the text


@given(TREES, st.lists(TREES, max_size=2))
def test_what_is_read_is_what_was_written(tree: Tree, inner: list[Tree]) -> None:
    """NaN, the infinities and −0 among numbers, "nan" among texts, whole numbers of any size, None, and classes within themselves."""
    whole = Tree(1, True, Colour.RED, None, (), None, {}, {"a": tree.anything}, "nan", (tree, *inner))
    assert same(read(Tree, json.loads(json.dumps(written(Tree, whole)))), whole)


GOOD = Tree(1, True, Colour.RED, Leaf("a", 1.0), ((1, "a"),), ((1.0,),), {"a": (1, 2)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"whole": 1.5}, {"whole": True}, {"yes": 1}, {"colour": "red"}, {"leaf": ("a", 1.0)}, {"pairs": [(1, "a")]}, {"pairs": ((1,),)},
        {"grid": (("1",),)}, {"named": {1: (1, 2)}}, {"named": {"a": (1, 2, 3)}}, {"anything": {"a": (1, 2)}}, {"anything": {"a": {1: 2}}},
        {"anything": {"a": object()}}, {"either": b"a"}, {"inner": (GOOD, None)}, {"leaf": Leaf(None, 1.0)},  # type: ignore[arg-type]
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_not_written(wrong: dict[str, Any]) -> None:
    """A tuple where anything may stand would be a list, a key that is a number a text: nobody finds out later."""
    values = {one.name: getattr(GOOD, one.name) for one in fields(GOOD)}
    with pytest.raises((TypeError, ValueError)):
        written(Tree, Tree(**{**values, **wrong}))


@given(JSON)
def test_other_data_is_refused(data: Any) -> None:
    """Whatever stands in a file: a class is made of its own fields, all of them, or not at all."""
    with pytest.raises((TypeError, ValueError)):
        read(Tree, data)
    for name in written(Tree, GOOD):
        with pytest.raises((TypeError, ValueError)):
            read(Tree, {**written(Tree, GOOD), name: {"no": "such"}} if name not in ("anything", "named") else {})
