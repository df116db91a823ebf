"""Weights that change places with other tensors: torch refuses that while anybody refers to them, so nobody of ours does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import nanscope


@pytest.fixture
def swapping() -> Iterator[None]:
    """`Module.to` swaps, as it always does with sharded and quantized weights."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def moved(model: nn.Module) -> None:
    model.to(torch.float64)
    model.to(torch.float32)


def train(model: nn.Module, amid: bool = False, bad: int = -1) -> list[list[float]]:
    """Three steps, after or amid each of which the model is moved. bad: the step whose loss overflows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    for step in range(3):
        (model(x).abs() * (1e4 if step == bad else 1.0)).exp().mean().backward()  # a loss that is held would be in the way
        if amid:
            moved(model)
        optimizer.step()
        optimizer.zero_grad()
        if not amid:
            moved(model)
    return [p.flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("amid", [False, True], ids=["between two steps", "before the optimizer"])
def test_weights_are_swapped_as_without_us(swapping: None, tmp_path: Path, amid: bool) -> None:
    """Whatever is held, weakly or not, is let go of; a step that runs is not seen any further, and that is said."""
    trained = []
    scope = nanscope.watch(out=tmp_path)
    for around in (nullcontext(), scope):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with around:
            trained.append(train(model, amid))
    assert trained[0] == trained[1] and scope.steps == 3
    assert {gap.slug for gap in scope.verdict.gaps} == ({"swapped"} if amid else set())


def test_a_model_that_was_only_called_is_swapped_as_without_us(swapping: None, tmp_path: Path) -> None:
    """Its buffers are known since it was called, and no step has begun: of these, too, nothing is in the way."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with nanscope.watch(out=tmp_path):
        model(torch.linspace(-1, 1, 6).reshape(2, 3))
        model.load_state_dict(kept)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in kept.items())


def test_a_bad_step_after_a_swap_is_found(swapping: None, tmp_path: Path) -> None:
    """The weights are other tensors under the same names, and the watch goes on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with nanscope.watch(out=tmp_path) as scope:
        train(model, bad=1)
    (incident,) = [one for one in scope.verdict.incidents if one.step == 2]
    assert "exp" in incident.sentence and incident.cause == "exp_overflow"


def test_weights_of_a_wrapping_class_are_moved_as_without_us(tmp_path: Path) -> None:
    """What consists of other tensors, as sharded and quantized weights do, is always swapped."""
    for around in (nullcontext(), nanscope.watch(out=tmp_path)):
        model = nn.Linear(3, 1, bias=False)
        model.weight = nn.Parameter(TwoTensor(torch.ones(1, 3), torch.ones(1, 3)))
        with around:
            model(torch.ones(2, 3)).sum().backward()
            before = model.weight
            model.zero_grad()
            model.to(torch.float64)
        assert model.weight is before and model.weight.dtype is torch.float64


def test_torch_has_its_own_function_back(tmp_path: Path) -> None:
    """The wrapper goes with the block, and stays off if somebody has put another one over it."""
    original = torch.utils.swap_tensors
    with nanscope.watch(out=tmp_path):
        assert torch.utils.swap_tensors is not original
    assert torch.utils.swap_tensors is original

    def theirs(t1: Tensor, t2: Tensor) -> None:
        original(t1, t2)

    with nanscope.watch(out=tmp_path):
        torch.utils.swap_tensors = theirs
    assert torch.utils.swap_tensors is theirs
    torch.utils.swap_tensors = original
