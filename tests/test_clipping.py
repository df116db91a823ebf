"""What a clip measures and multiplies by tells the norm of the gradients, and whoever writes to them after that is noticed all the same."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching import line
from nanscope.watching.acting import OnNonFinite

Then = Callable[[nn.Module], None]


def train(
    out: Path, then: Then = lambda model: None, at: int = 4, on_nonfinite: OnNonFinite = "record", most: float = 0.1
) -> nanscope.Scope:
    """Train a few steps, whose gradients are clipped; in one of them something is done after that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=out, on_nonfinite=on_nonfinite) as scope:
        for step in range(1, 7):
            loss = model(torch.randn(6, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), most)
            if step == at:
                then(model)
            optimizer.step()
    return scope


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has one entry for each time that gradients are read for their norm: how many."""
    found: list[int] = []
    norms = line.norms

    def counted(grads: list[Tensor]) -> Tensor:
        found.append(len(grads))
        return norms(grads)

    monkeypatch.setattr(line, "norms", counted)
    return found


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_the_norm_is_what_the_clip_has_left(tmp_path: Path, read: list[int], most: float) -> None:
    """To rounding, and nobody has read the gradients for it: one pass over them less."""
    exact: list[float] = []
    scope = train(tmp_path / "told", lambda model: exact.append(norm_of(model)), most=most)
    assert read == []
    entry = scope.history.entries[3]
    assert (entry.grad_norm if entry.grad_norm_clipped is None else entry.grad_norm_clipped) == pytest.approx(exact[0], rel=1e-5)
    assert (entry.grad_norm_clipped is None) == (most > 1) and scope.verdict.healthy


def refreshed(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = grad_of(weight) / 1.0


def by_a_number_that_changes(model: nn.Module) -> None:
    refreshed(model)
    norms_and(model, torch.tensor(0.5)).mul_(100.0)


def uphill(model: nn.Module) -> None:
    refreshed(model)
    norms_and(model, torch.tensor(-0.5))


def one_of_them_twice(model: nn.Module) -> None:
    refreshed(model)
    grads = [grad_of(weight) for weight in model.parameters()]
    torch._foreach_norm(grads)
    torch._foreach_mul_([*grads, grads[0]], torch.tensor(0.5))


def made_larger(model: nn.Module) -> None:
    refreshed(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for weight in model.parameters():
        grad_of(weight).mul_(100)


def logged_and_changed(model: nn.Module) -> None:
    refreshed(model)
    torch._foreach_norm([grad_of(weight) for weight in model.parameters()])
    for weight in model.parameters():
        grad_of(weight).mul_(0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def norms_and(model: nn.Module, factor: Tensor) -> Tensor:
    """Take norms, multiply, and return by what."""
    grads = [grad_of(weight) for weight in model.parameters()]
    torch._foreach_norm(grads)
    torch._foreach_mul_(grads, factor)
    return factor


CHANGES = [refreshed, by_a_number_that_changes, uphill, one_of_them_twice, made_larger, logged_and_changed]


@pytest.mark.parametrize("then", CHANGES, ids=lambda then: then.__name__)
def test_the_norm_of_what_is_changed_otherwise(tmp_path: Path, then: Then) -> None:
    """It is that which the optimizer is given."""
    exact: list[float] = []

    def changed(model: nn.Module) -> None:
        then(model)
        exact.append(norm_of(model))

    entry = train(tmp_path, changed).history.entries[3]
    assert (entry.grad_norm_clipped or entry.grad_norm) == pytest.approx(exact[0], rel=1e-5)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-5), (torch.bfloat16, 1e-2)])
def test_gradients_of_two_dtypes(tmp_path: Path, read: list[int], dtype: torch.dtype, precision: float) -> None:
    """The clip has a list for each; in bfloat16 a norm is to three digits, whoever takes it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        model[1](model[0](torch.randn(6, 4)).to(dtype)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        exact = float(torch.linalg.vector_norm(torch.cat([grad_of(weight).double().flatten() for weight in model.parameters()])))
        optimizer.step()
    assert read == [] and scope.history.entries[0].grad_norm_clipped == pytest.approx(exact, rel=precision)


@pytest.mark.parametrize("mode", ["stop", "skip", "repair"])
def test_who_acts_before_the_step_reads_them(tmp_path: Path, read: list[int], mode: OnNonFinite) -> None:
    """What nobody was seen to write must not get into the weights."""
    train(tmp_path, on_nonfinite=mode)
    assert read == [4] * 6


def norm_of(model: nn.Module) -> float:
    return float(torch.linalg.vector_norm(torch.cat([grad_of(weight).flatten() for weight in model.parameters()])))


def grad_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def first(model: nn.Module) -> Tensor:
    return grad_of(next(model.parameters()))


def plainly(model: nn.Module) -> None:
    first(model)[1, 2] = math.nan


def by_another_name(model: nn.Module) -> None:
    first(model).data[1, 2] = math.nan


def unseen(model: nn.Module) -> None:
    first(model).numpy()[1, 2] = math.nan


def as_lists(model: nn.Module) -> None:
    torch._foreach_mul_([grad_of(weight) for weight in model.parameters()], torch.tensor(math.nan))


def as_lists_by_another_name(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_add_([grad_of(weight).data for weight in model.parameters()], math.nan)


def clipped_again(model: nn.Module) -> None:
    plainly(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def own(model: nn.Module) -> None:
    """A gradient that a call has made which waits, clipped once more."""
    for weight in model.parameters():
        weight.grad = grad_of(weight) / 1.0
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    first(model).mul_(math.nan)


def replaced(model: nn.Module) -> None:
    weight = next(model.parameters())
    weight.grad = grad_of(weight) * math.nan


def by_address(model: nn.Module) -> None:
    grad = first(model)
    torch.from_numpy(grad.numpy()).fill_(math.nan)


WAYS = [plainly, by_another_name, unseen, as_lists, as_lists_by_another_name, clipped_again, own, replaced, by_address]


@pytest.mark.parametrize("then", WAYS, ids=lambda then: then.__name__)
def test_gradients_that_are_written_to_after_the_clip(tmp_path: Path, then: Then) -> None:
    """It is told of the gradients, and not of the update that they went into."""
    scope = train(tmp_path, then)
    incident = scope.verdict.incidents[0]
    assert incident.step == 4 and incident.reached["gradients"][0] > 0 and incident.phase == "backward", scope.verdict.sentence
    assert not math.isfinite(scope.history.entries[3].grad_norm_clipped or scope.history.entries[3].grad_norm or 0.0)
    assert "exp_avg" not in scope.verdict.sentence and (scope.steps, scope.bad_steps) == (6, 3), scope.verdict.sentence


class SpoilsGradients(torch.optim.Optimizer):
    """Writes to the gradients itself. inner: that then takes the step, if any."""

    def __init__(self, params: Iterable[nn.Parameter], inner: torch.optim.Optimizer | None = None) -> None:
        super().__init__(params, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.mul_(math.inf)
                weight.sub_(weight.grad if self.inner is None else 0.0)
        if self.inner is not None:
            self.inner.step()


@pytest.mark.parametrize("wraps", [False, True])
def test_an_optimizer_that_writes_to_gradients_itself(tmp_path: Path, wraps: bool) -> None:
    """They were fine when it began; one that is called by it is given what is not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = SpoilsGradients(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1) if wraps else None)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.randn(6, 4)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert scope.verdict.incidents[0].phase == ("backward" if wraps else "optimizer"), scope.verdict.sentence


@pytest.mark.parametrize("scale", [1e30, math.inf])
def test_a_norm_that_overflows(tmp_path: Path, read: list[int], scale: float) -> None:
    """Only its own reading tells whether a gradient has."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        (model(torch.ones(6, 4)) * scale).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert read == [2] and not scope.verdict.healthy, scope.verdict.sentence


def test_halves_that_overflow(tmp_path: Path, read: list[int]) -> None:
    """float16 ends at 65504, and a norm in float32 far beyond."""
    model = nn.Linear(4, 1, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(6, 4, dtype=torch.float16)).float().pow(2).mean().backward()
        norms_and(model, torch.tensor(1e7))
        optimizer.step()
    assert read == [2] and scope.verdict.incidents[0].reached["gradients"][0] > 0, scope.verdict.sentence


def test_gradients_of_the_first_step_are_let_go_of_with_it(tmp_path: Path) -> None:
    """What a clip has read is held while its step lasts, and not until the next one is differentiated."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for _ in range(2):
            model(torch.randn(6, 4)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            gone = [weakref.ref(grad_of(weight)) for weight in model.parameters()]
            optimizer.zero_grad()
            assert [one() for one in gone] == [None, None]
    assert scope.verdict.healthy and scope.steps == 2
