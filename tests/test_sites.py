"""Who has made a call: the line of the trainer's, and not what stands between it and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import nanscope
from nanscope.verdict.incident import Incident


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each call on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same, one storey up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def handed(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **(kwargs or {}))


class Asks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves it to a function."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handed(func, args, kwargs)


class Named(Tensor):
    """A tensor of a class of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def both() -> Iterator[None]:
    with Counts(), Functions(), Asks():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "dispatch": Counts,
    "function": Functions,
    "by way of a function": Asks,
    "several": both,
    "torch's own": lambda: FlopCounterMode(display=False),
}


def incident_of(out: Path, mode: Callable[[], AbstractContextManager[Any]], model: nn.Module, line: Callable[[Tensor], Tensor]) -> Incident:
    with nanscope.watch(out=out) as scope, mode():
        line(model(torch.ones(2, 4))).mean().backward()
    return scope.verdict.incidents[0]


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_hands_calls_on_is_not_who_made_them(tmp_path: Path, name: str) -> None:
    """The line that it was made in is told."""
    incident = incident_of(tmp_path, MODES[name], nn.Linear(4, 1), lambda y: torch.log(y * 0))
    assert incident.origin.expression == "torch.log(y * 0)" and incident.origin.file == __file__


def test_a_tensor_of_a_class_of_its_own(tmp_path: Path) -> None:
    """Neither is it."""
    incident = incident_of(tmp_path, nullcontext, nn.Linear(4, 1), lambda y: torch.log(y.as_subclass(Named) * 0).as_subclass(Tensor))
    assert incident.origin.expression == "torch.log(y.as_subclass(Named) * 0)"


class Logs(nn.Module):
    """Goes wrong inside, by way of a function that takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.layer(x) * 0)


@pytest.mark.parametrize("name", MODES)
def test_inside_a_model(tmp_path: Path, name: str) -> None:
    """The second look does not see those modes; nor does it take a function that hands on what it is given for one."""
    incident = incident_of(tmp_path, MODES[name], Logs(), lambda y: y)
    assert incident.origin.expression == "torch.log(self.layer(x) * 0)"


def test_a_function_that_hands_on_what_it_is_given_makes_calls_of_its_own(tmp_path: Path) -> None:
    """Where no mode has asked it."""
    incident = incident_of(tmp_path, nullcontext, nn.Linear(4, 1), lambda y: handed(torch.log, (y * 0,), None))
    assert incident.origin.expression == "func(*args, **kwargs or {})"
