"""Generators that a model is given or holds: what is run again draws the same, and they stay where they were."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.generators import held, paths_in, set_back, standing


class Noisy(nn.Module):
    """Adds −log(−log u) to its input, where u was rounded to 1 in one place; u is drawn from what it is given, or from what it holds."""

    def __init__(self, source: Any = None) -> None:
        super().__init__()
        self.linear, self.source = nn.Linear(8, 8), source

    def forward(self, x: Tensor, source: Any = None) -> Tensor:
        source = source or getattr(self.source, "source", self.source)
        if isinstance(source, torch.Generator):
            drawn = torch.rand(x.shape, generator=source)
        else:
            drawn = torch.tensor([[source.random() for _ in range(8)] for _ in range(len(x))])
        noise = -torch.log(-torch.log(drawn.to(torch.bfloat16)))
        return (self.linear(x) + noise.float()).softmax(-1)  # type: ignore[no-any-return]


GIVEN: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "an argument": lambda one: (None, (one,), {}),
    "a keyword": lambda one: (None, (), {"source": one}),
    "an attribute": lambda one: (one, (), {}),
    "of an object": lambda one: (SimpleNamespace(source=one), (), {}),
}
SOURCES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(6),
    "numpy": lambda: np.random.default_rng(6),
    "numpy as it was": lambda: np.random.RandomState(6),
    "python": lambda: random.Random(6),
}


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_where_one_stood_is_no_other_place_when_it_goes_on(kind: str) -> None:
    source = np.random.Generator(getattr(np.random, kind)(6))
    (stood,) = standing([source])
    drawn = source.random(700).tolist()
    set_back(source, stood.state)
    assert source.random(700).tolist() == drawn


def stands(source: Any) -> bytes:
    """Where a generator stands."""
    return bytes(source.get_state().tolist()) if isinstance(source, torch.Generator) else pickle.dumps(source)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("how", GIVEN)
def test_what_a_model_draws_from_a_generator_of_its_own_it_draws_again(tmp_path: Path, how: str, kind: str) -> None:
    """Given with the call or held by the model: the look inside meets the numbers of the step, and leaves the generator where it was."""
    source = SOURCES[kind]()
    held, args, given = GIVEN[how](source)
    model, x = Noisy(held), torch.zeros(200, 8)
    with nanscope.watch(out=tmp_path) as scope:
        out = model(x, *args, **given)
        before = stands(source)
        out.log().sum().backward()
    (incident,) = scope.verdict.incidents
    where = (~torch.isfinite(out.detach())).any(-1).nonzero().flatten().tolist()
    assert (incident.phase, incident.cause, incident.origin.op) == ("forward", "log_zero", "log") and not incident.notes
    assert incident.origin.index[0] == where[0] and incident.origin.function == "Noisy.forward"
    assert stands(source) == before


def test_only_what_is_there_is_asked_for() -> None:
    """A model without one costs nothing at a call; one that is put in the place of another is found where that was."""
    model = nn.Sequential(nn.Linear(2, 2), Noisy(random.Random(1)))
    assert not paths_in(model[0])
    paths = paths_in(model)
    model[1].source = random.Random(2)
    assert [*held(paths)] == [model[1].source]
    model[1].source = None
    assert not [*held(paths)]
