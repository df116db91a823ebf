"""What code names beyond its objects is put back after it ran once more."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

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
        self.draw()
        globals()["UNNAMED"].append(1)  # not by its name

    @staticmethod
    def draw() -> None:
        python, generator, state, own = RNGS
        python.random()
        generator.random()
        state.rand()
        torch.rand((), generator=own)


def everything() -> dict[str, Any]:
    return {
        "a global": COUNT, "a list in a dict": str(STATS), "a deque": list(RECENT), "a counter": dict(TALLY),
        "a class attribute": Model.runs, "a list of a class": list(Model.sizes), "an attribute of a module": SETTINGS.level,  # type: ignore[attr-defined]
        "an attribute of a function": helper.calls, "attributes of an object": (METER.total, dict(METER.parts)),  # type: ignore[attr-defined]
        "a variable of an enclosing function": KEPT(), "a default argument": list(Model.forward.__defaults__[0]),  # type: ignore[index]
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
