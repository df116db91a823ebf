"""What code names beyond its objects is put back after it ran once more."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import queue
import random
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanscope.capture.alone import NotIsolated
from nanscope.capture.reach import Reach

COUNT = 0
STATS: dict[str, list[int]] = {"seen": []}
RECENT: deque[int] = deque([1, 2], maxlen=2)
TALLY = Counter({"a": 1})
RNGS = (random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator().manual_seed(1))
SETTINGS = ModuleType("settings")
SETTINGS.level = 1  # type: ignore[attr-defined]
UNNAMED: list[int] = []


class Meter:
    def __init__(self) -> None:
        self.value = SimpleNamespace()
        self.total, self.parts = 0, {"x": 1}


METER = Meter()


def helper() -> None:
    helper.calls = getattr(helper, "calls", 0) + 1  # type: ignore[attr-defined]
    METER.total += 1
    METER.parts["x"] += 1


helper.calls = 0  # type: ignore[attr-defined]


def count_in(kept: int) -> tuple[Callable[[], None], Callable[[], int]]:
    def more() -> None:
        nonlocal kept
        kept += 1

    return more, lambda: kept


MORE, KEPT = count_in(0)


class Model:
    runs = 0
    sizes: list[int] = []  # noqa: RUF012 - shared on purpose

    def forward(self, memory: list[int] = []) -> None:  # noqa: B006 - as above
        global COUNT
        COUNT += 1
        STATS["seen"].append(COUNT)
        STATS["new"] = []
        RECENT.append(3)
        TALLY["a"] += 1
        self.other()
        memory.append(1)

    def other(self) -> None:
        type(self).runs += 1
        self.sizes.append(1)
        SETTINGS.level += 1  # type: ignore[attr-defined]
        helper()
        MORE()
        next(TURNS)  # type: ignore[call-overload]
        self.draw()
        globals()["UNNAMED"].append(1)  # not by its name

    @staticmethod
    def draw() -> None:
        python, generator, state, own = RNGS
        python.random()
        generator.random()
        state.rand()
        torch.rand((), generator=own)


class Turns:
    """An iterator of the trainer's own, which says by its attributes how far it is."""

    def __init__(self) -> None:
        self.turn = 0

    def __next__(self) -> int:
        self.turn += 1
        return self.turn


TURNS = Turns()


def everything() -> dict[str, Any]:
    return {
        "a global": COUNT, "a list in a dict": str(STATS), "a deque": list(RECENT), "a counter": dict(TALLY),
        "a class attribute": Model.runs, "a list of a class": list(Model.sizes), "an attribute of a module": SETTINGS.level,  # type: ignore[attr-defined]
        "an attribute of a function": helper.calls, "attributes of an object": (METER.total, dict(METER.parts)),  # type: ignore[attr-defined]
        "an iterator of a class": TURNS.turn, "a variable of an enclosing function": KEPT(), "a default argument": list(Model.forward.__defaults__[0]),  # type: ignore[index]
        "generators": [RNGS[0].getstate(), str(RNGS[1].bit_generator.state), str(RNGS[2].get_state()), RNGS[3].get_state().tolist()],
    }  # fmt: skip


@pytest.mark.parametrize("name", everything())
def test_what_code_names_is_put_back(name: str) -> None:
    """Wherever it counts: after the run it has not."""
    before, seen = everything()[name], STATS["seen"]
    reach = Reach([Model])
    Model().forward()
    assert everything()[name] != before
    reach.put_back()
    assert everything()[name] == before and STATS["seen"] is seen


def test_what_code_does_not_name_is_left_alone() -> None:
    """What others change meanwhile, in another thread, is theirs."""
    reach = Reach([Model])
    UNNAMED.append(5)
    reach.put_back()
    assert UNNAMED[-1] == 5


def test_code_of_torch_is_not_looked_into() -> None:
    """It keeps nothing of a model's, and there is too much of it."""
    assert not Reach([torch.nn.Linear, torch.nn.functional.linear])._undo


HANDED: Any = None


def stand(thing: Any) -> dict[str, Callable[[], Any]]:
    """The places that something may stand in, and code that reads from it there."""
    global HANDED
    HANDED, Holder.attribute, Holder.items, Holder.pair = thing, thing, {"it": [0, thing]}, (0, thing)

    def default(it: Any = thing) -> Any:
        return next(it)

    def keyword(*, it: Any = thing) -> Any:
        return next(it)

    return {
        "a global": lambda: next(HANDED),
        "an attribute": lambda: next(Holder.attribute),
        "in containers": lambda: next(Holder.items["it"][1]),
        "in a tuple": lambda: next(Holder.pair[1]),
        "an enclosing function": lambda: next(thing),
        "a default": default,
        "a default by name": keyword,
    }


class Holder:
    attribute: Any
    items: Any
    pair: Any


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([1, 2, 3, 4]),
    "tuple": lambda: iter((1, 2, 3, 4)),
    "dict": lambda: iter({1: 0, 2: 0, 3: 0, 4: 0}.items()),
    "set": lambda: iter({1, 2, 3, 4}),
    "range": lambda: iter(range(9)),
    "deque": lambda: iter(deque([1, 2, 3, 4])),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "cycle of an iterator": lambda: itertools.cycle(iter([1, 2, 3])),
    "zip": lambda: zip(itertools.count(), iter([1, 2, 3, 4]), strict=False),
    "enumerate": lambda: enumerate(iter([1, 2, 3, 4])),
    "map": lambda: map(str, itertools.count()),
    "filter": lambda: filter(None, itertools.count()),
    "chain": lambda: itertools.chain(iter([1, 2]), iter([3, 4, 5])),
    "islice": lambda: itertools.islice(itertools.count(), 2, 9),
    "accumulate": lambda: itertools.accumulate(itertools.count()),
    "repeat": lambda: itertools.repeat(1, 4),
    "product": lambda: itertools.product([1, 2], [3, 4]),
    "permutations": lambda: itertools.permutations([1, 2, 3]),
    "groupby": lambda: itertools.groupby(iter([1, 2, 3, 4])),
    "lines": lambda: io.StringIO("1\n2\n3\n4\n"),
}
NO_TWIN: dict[str, Callable[[Path], Any]] = {
    "a generator": lambda folder: (n for n in range(9)),
    "zip of a generator": lambda folder: zip((n for n in range(9)), itertools.count(), strict=False),
    "tee": lambda folder: itertools.tee(iter([1, 2, 3]))[0],
    "a file": lambda folder: (folder / "lines").open("w+"),
    "a loader": lambda folder: iter(torch.utils.data.DataLoader([1, 2, 3])),  # type: ignore[arg-type]
    "csv": lambda folder: csv.reader(["1", "2"]),
    "a queue": lambda folder: queue.Queue(),
    "a simple queue": lambda folder: queue.SimpleQueue(),
    "calls of one": lambda folder: iter(iter([1, 2, 3, 4]).__next__, 9),
    "a bound method": lambda folder: (n for n in range(9)).__next__,
    "a partial function": lambda folder: functools.partial(next, iter([1, 2])),
    "a socket": lambda folder: socket.socket(),
}


def rest(thing: Iterator[Any]) -> list[str]:
    return [str(item[0] if isinstance(item, tuple) else item) for item in itertools.islice(thing, 8)]


@pytest.mark.parametrize("place", stand(None))
@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_stands_where_it_stood(name: str, place: str) -> None:
    """Code that runs once more is handed what the trainer would be, and he is handed it still; the same object as before."""
    thing = ITERATORS[name]()
    first = next(thing)
    code = stand(thing)[place]
    reach = Reach([code])
    reach.lend()
    again = [code(), code()]
    reach.put_back()
    assert HANDED is Holder.attribute is Holder.items["it"][1] is Holder.pair[1] is thing
    twin = ITERATORS[name]()
    assert str(first)[:2] == str(next(twin))[:2]
    left = rest(thing)
    assert left == rest(twin)
    assert [str(item[0] if isinstance(item, tuple) else item) for item in again] == left[:2]


def test_one_iterator_is_one_wherever_it_stands() -> None:
    """Code that reads it by two names is handed each thing once."""
    code = stand(itertools.count())
    both = [code["a global"], code["an attribute"], code["in a tuple"]]
    reach = Reach(both)
    reach.lend()
    assert [read() for read in both] == [0, 1, 2]
    reach.put_back()
    assert next(HANDED) == 0


@pytest.mark.parametrize("name", NO_TWIN)
def test_what_has_no_twin_is_not_read_twice(name: str, tmp_path: Path) -> None:
    """Code that leads to it is not to run once more, and what it would read is still there."""
    thing = NO_TWIN[name](tmp_path)
    with contextlib.closing(thing) if hasattr(thing, "close") else contextlib.nullcontext():
        for code in stand(thing).values():
            with pytest.raises(NotIsolated, match="only once"):
                Reach([code])


def test_a_global_that_is_only_named_as_an_attribute_is_none_of_its() -> None:
    """`x.data` does not read the `data` of the script."""
    Reach([names_an_attribute])


data = (n for n in range(3))


def names_an_attribute(x: torch.Tensor) -> torch.Tensor:
    return x.data


class Lazy(OrderedDict[str, int]):
    """Makes what it holds when somebody asks for it, as transformers imports its models."""

    def items(self) -> Any:
        raise ImportError("one of them cannot be had")

    def __len__(self) -> int:
        raise ImportError("all of them were to be counted")

    def __iter__(self) -> Any:
        raise ImportError("all of them were to be listed")


LAZY = Lazy()
OrderedDict.__setitem__(LAZY, "first", 1)
OrderedDict.__setitem__(LAZY, "second", 2)


def look_up() -> int:
    return LAZY["first"]


def test_a_container_is_looked_into_without_its_own_code() -> None:
    """What a class makes of being asked what it holds is not run; what it holds is put back all the same, in its order."""
    OrderedDict.move_to_end(LAZY, "first")
    reach = Reach([look_up])
    OrderedDict.__setitem__(LAZY, "third", 3)
    reach.put_back()
    assert list(OrderedDict.items(LAZY)) == [("second", 2), ("first", 1)]


class _Raises(type):
    """As a library puts in the place of a class whose requirements are not installed."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ImportError("not installed")


class Absent(metaclass=_Raises):
    pass


def test_a_class_that_is_not_installed_is_not_asked() -> None:
    def code() -> type:
        return Absent

    assert Reach([code])
