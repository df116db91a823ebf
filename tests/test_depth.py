"""What is heard inside modules: who overflowed, and how near the others came, without a number of theirs being held."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanscope.capture.depth import Depth, Sounding
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape


def heard(function: Callable[..., object], *args: Tensor) -> Sounding:
    """What is heard of a function."""
    mode = TapeMode(Tape())
    mode.depth = Depth()
    with mode:
        function(*args)
    return mode.depth.take().ask()


HALF = torch.tensor([1.0, 400.0]).half()

OVERFLOWS: dict[str, tuple[Callable[[Tensor], object], Tensor, list[str]]] = {
    # the function, what goes in, the calls that overflow
    "none": (lambda x: x * 2, HALF, []),
    "a square": (lambda x: torch.rsqrt(x.pow(2)), HALF, ["pow"]),
    "in place": (lambda x: x.clone().mul_(400), HALF, ["mul"]),
    "what came in as infinity": (lambda x: x * 2, torch.tensor([1.0, math.inf]), []),
    "what the code gives": (lambda x: x * math.inf, HALF, []),
    "a mask": (lambda x: (x + torch.full_like(x, -math.inf)).softmax(0), HALF, []),
    "a filled mask": (lambda x: x.masked_fill(x > 1, -math.inf).softmax(0), HALF, []),
    "only the first of a chain": (lambda x: (x * 400).sum().exp() + 1, HALF, ["mul"]),
    "a part written to": (lambda x: _written(x) + 1, HALF, []),
    "each of two": (lambda x: (torch.tanh(x * 400), torch.tanh(x.square())), HALF, ["mul", "pow"]),
    "not a number": (lambda x: (x - 2).log(), HALF, []),
    "memory with nothing in it": (lambda x: torch.empty_like(x).fill_(1.0) + x, HALF, []),
}


def _written(x: Tensor) -> Tensor:
    made = torch.full((4,), -math.inf, dtype=x.dtype)
    made[:2] = x
    return made


@pytest.mark.parametrize("name", OVERFLOWS)
def test_who_made_an_infinity_of_finite_numbers_is_heard(name: str) -> None:
    """What is infinite on purpose, came in so, or is no number is not an overflow; nor is what one made."""
    function, x, ops = OVERFLOWS[name]
    found = heard(function, x)
    assert [op for op, _ in found.overflows] == ops
    assert all(code is not None and Path(code.co_filename) == Path(__file__) for _, (code, _) in found.overflows)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 2.0), (torch.bfloat16, 114.0), (torch.float32, 114.0)])
def test_the_least_room_is_told_in_bits_of_its_own_dtype(dtype: torch.dtype, bits: float) -> None:
    """16384 is two doublings below the end of half precision."""
    room = heard(lambda x: (x * 128, x * 2), torch.tensor([1.0, 128.0], dtype=dtype)).room
    assert room is not None and (room.op, room.dtype) == ("mul", dtype) and room.bits == pytest.approx(bits, abs=0.01)


def test_nothing_of_a_model_is_held() -> None:
    """Two numbers are taken of what a call makes, and the tensor itself can go."""
    mode, made = TapeMode(Tape()), list[weakref.ref[Tensor]]()
    mode.depth = Depth()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for part in model:
        part.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    with mode, torch.no_grad():
        model(torch.rand(8, 64))
    gc.collect()
    assert len(made) == 3 and not any(one() is not None for one in made)
    assert max(mark.low.untyped_storage().nbytes() for mark in mode.depth.take().marks) <= 8


def test_of_a_step_only_so_many_calls_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without end inside a model takes no memory without end."""
    monkeypatch.setattr("nanscope.capture.depth.CALLS", 5)
    mode = TapeMode(Tape())
    mode.depth = Depth()
    with mode:
        for _ in range(100):
            HALF * 2
    assert len(mode.depth.take().marks) == 5
