"""When models are listened to: in the first steps and in one of so many, with gradients, alone, and where nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.awake import Awake, is_open
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.errors import NanscopeError


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, list(range(1, 13))), (5, [1, 2, 3, 5, 10]), (100, [1, 2, 3])], ids=["never", "each", "one of 5", "rare"]
)
def test_which_steps_are_deep(tmp_path: Path, every: int, due: list[int]) -> None:
    """The history says of these how near the model came to the end of its dtype."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path, deep_every=every) as scope:
        for _ in range(12):
            for _ in range(2):  # micro-batches
                model(torch.rand(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [entry.step for entry in scope.history.entries if entry.headroom_bits is not None] == due
    assert all("in float32, test_awake.py:" in str(entry.headroom_at) for entry in scope.history.entries if entry.step in due)
    assert scope.verdict.healthy and not scope.notes


def compiled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return nn.Sequential(module)


CLOSED: dict[str, Callable[[], nn.Module]] = {
    "compiled in place": compiled,
    "a compiled copy": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_compiled_is_left_alone(name: str) -> None:
    """It would be compiled anew."""
    assert not is_open(CLOSED[name]()) and is_open(nn.Linear(2, 2))


def test_the_tape_sleeps_without_gradients() -> None:
    """Sampling makes millions of calls."""
    mode = TapeMode(Tape())
    awake = Awake(mode, 1)
    with torch.no_grad():
        awake.begin(nn.Linear(2, 2))
    assert mode.depth is None and mode.sleeping
    awake.end()
    awake.begin(nn.Linear(2, 2))
    assert mode.depth is not None and not mode.sleeping
    awake.end()
    assert mode.depth is None


def test_in_a_transform_nothing_is_heard(tmp_path: Path) -> None:
    """vmap hands over tensors that stand for others."""
    model = nn.Linear(3, 1)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    with nanscope.watch(out=tmp_path, deep_every=1) as scope:
        torch.func.vmap(loss)(torch.rand(5, 3)).sum().backward()
    assert scope.verdict.healthy


@pytest.mark.parametrize("wrong", [-1, True, 2.5, "often"])
def test_how_often_is_a_whole_number(tmp_path: Path, wrong: object) -> None:
    """Anything else is an error at once."""
    with pytest.raises(NanscopeError, match="deep_every"):
        nanscope.watch(out=tmp_path, deep_every=wrong)  # type: ignore[arg-type]
