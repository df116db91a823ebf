"""Days of training: what nanscope holds, and what it does at a step, is the same at the end as after the first steps.

Counted are our own things (values, calls, recordings, bytes on the account), the objects of the interpreter, and how many values are
numbered at each step, which is our work. The long form runs each loop for longer and looks at the resident memory of the process, too.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture import log, source
from nanscope.watching.scope import Scope

NIGHTLY = os.environ.get("NANSCOPE_NIGHTLY") == "1"
ROUNDS = 3000

Loop = Callable[[int], None]


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def with_an_optimizer() -> Loop:
    model = mlp(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(number: int) -> None:
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def by_hand() -> Loop:
    """Backward passes, and no torch optimizer that would end a step."""
    weight, model, momentum = torch.zeros(16, requires_grad=True), mlp(16, 16), torch.zeros(16)

    def step(number: int) -> None:
        (model(torch.randn(8, 16)) @ weight).exp().mean().backward()
        with torch.no_grad():
            momentum.mul_(0.9).add_(weight.grad, alpha=0.1)
            weight.sub_(1e-3 * momentum)
        weight.grad = None
        model.zero_grad()

    return step


def actor_critic() -> Loop:
    """As in SAC: three losses, target networks written to with `out=`, a replay buffer written row by row."""
    actor, critic, target = mlp(3, 1), mlp(4, 1), mlp(4, 1)
    temperature, buffer = torch.zeros(1, requires_grad=True), torch.zeros(64, 3)
    optimizers = [torch.optim.SGD(of, 1e-3) for of in (actor.parameters(), critic.parameters(), [temperature])]

    def take(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def step(number: int) -> None:
        buffer[number % len(buffer)] = torch.randn(3)
        seen, action, reward = buffer[:8], torch.randn(8, 1), torch.randn(8, 1)
        with torch.no_grad():
            value = reward + 0.99 * target(torch.cat([seen, actor(seen).tanh()], 1))
        take((critic(torch.cat([seen, action], 1)) - value).square().mean(), optimizers[1])
        chosen = actor(seen).tanh()
        take((temperature.exp() * chosen.square() - critic(torch.cat([seen, chosen], 1))).mean(), optimizers[0])
        take((temperature * (chosen.detach().square() - 0.5)).mean(), optimizers[2])
        with torch.no_grad():
            for own, other in zip(target.parameters(), critic.parameters(), strict=True):
                own.data.mul_(0.99)
                torch.add(own.data, other.data, alpha=0.01, out=own.data)

    return step


def accumulated() -> Loop:
    """200 micro-batches a step, each with data of its own."""
    weight = torch.zeros(64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)

    def step(number: int) -> None:
        (torch.randn(64, 64) @ weight).square().mean().backward()
        if number % 200 == 199:
            optimizer.step()
            optimizer.zero_grad()

    return step


def evaluated() -> Loop:
    """Losses that nobody differentiates, some of which raise, and text that is sampled into a buffer."""
    model, cache = mlp(4, 4), torch.zeros(4, 100)

    def step(number: int) -> None:
        with contextlib.suppress(ZeroDivisionError):
            float((model(torch.randn(8, 4)) * 2).exp().mean().detach()) / (number % 2)
        with torch.no_grad():
            cache[:, number % 100] = torch.softmax(model(torch.randn(4, 4)), -1).argmax(-1).float()

    return step


def by_autograd_grad() -> Loop:
    """Gradients that never go through `backward`, with a second derivative."""
    model = mlp(4, 1)

    def step(number: int) -> None:
        given = torch.randn(8, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        grads = torch.autograd.grad((slope.norm(dim=1) - 1).square().mean(), list(model.parameters()), allow_unused=True)
        for weight, grad in zip(model.parameters(), grads, strict=True):
            if grad is not None:
                weight.data.add_(grad, alpha=-1e-3)

    return step


def of_any_length() -> Loop:
    """A program of its own for each length of a sequence, code of its own for each step, and a pass over a graph that is kept."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)

    def step(number: int) -> None:
        loss = (weight * 2).exp()
        for _ in range(number % 89):
            loss = loss + 1
        scope: dict[str, Tensor] = {"loss": loss}
        exec(compile(f"total = (loss * {number}.0).sum() * 0", f"/home/somebody/cell-{number}.py", "exec"), scope)
        scope["total"].backward(retain_graph=True)
        scope["total"].backward()
        optimizer.step()

    return step


LOOPS: list[Callable[[], Loop]] = [with_an_optimizer, by_hand, actor_critic, accumulated, evaluated, by_autograd_grad, of_any_length]


MAY_GROW = {"code"}  # functions that were seen: bounded, but not within a few thousand steps that compile a new one each


@dataclass(frozen=True)
class Part:
    """What a third of a soak has come to: the largest sizes, values numbered, objects of the interpreter, resident MB."""

    largest: dict[str, int]
    numbered: int
    objects: int
    resident: int


def sizes(scope: Scope) -> dict[str, int]:
    """Return how much there is of everything that nanscope keeps, by name."""
    tape, step, known = scope._tape, scope._step, scope._tape.known
    return {
        "values": len(tape.values),
        "calls": len(tape.entries),
        "most in one memory": max(map(len, known.by_storage.values()), default=0),
        "findable": len(known.by_key),
        "norms": len(tape.clipping.norms),
        "opaque": len(tape._opaques),
        "code": len(tape.callers._authors.known),
        "recordings": len(step._recordings),
        "module calls": len(scope._modules.calls),
        "dials": len(step._outlook._gauge._dials),
    }


@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__)
def test_memory_and_work_stay_flat(make: Callable[[], Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 steps, or backward passes without a step, leave no more than the first third of them did; nor do other loops, for shorter."""
    rounds = ROUNDS * 10 if NIGHTLY else ROUNDS if make in (with_an_optimizer, by_hand) else ROUNDS // 5
    monkeypatch.setattr(log, "SHARE", 64)
    monkeypatch.setattr(log, "RING", 200)  # what outlives a backward pass is at its most after a few rounds
    monkeypatch.setattr(source, "SITES", 32)  # and so are the lines that are remembered
    monkeypatch.setattr(source, "_site", lru_cache(maxsize=32)(source._site.__wrapped__))
    parts: list[Part] = []
    loop, budget = make(), 1 << 20
    with nanscope.watch(out=tmp_path, budget=budget) as scope:
        for part in range(3):
            largest: dict[str, int] = {}
            numbered = scope._tape.length
            for number in range(part * rounds // 3, (part + 1) * rounds // 3):
                loop(number)
                if number % 7 == 0:
                    largest = {name: max(size, largest.get(name, 0)) for name, size in sizes(scope).items()}
                    assert scope._tape.held <= budget
            gc.collect()
            parts.append(Part(largest, scope._tape.length - numbered, len(gc.get_objects()) + gc.get_freeze_count(), resident()))
    first, second, last = parts
    assert not scope._tape.broken and not scope._failsafe.failures
    assert {gap.slug for gap in scope.verdict.gaps} == ({"own-gradients"} if make is by_autograd_grad else set())
    grown = {name: (first.largest[name], size) for name, size in last.largest.items() if size > 1.2 * first.largest[name] + 8}
    assert set(grown) <= MAY_GROW, grown
    assert last.numbered <= 1.05 * second.numbered, parts
    noise = 500 + second.objects // 2000  # what a process that has run thousands of tests makes beside
    assert last.objects <= second.objects + noise + 2 * sum(max(last.largest[name] - second.largest[name], 0) for name in grown), parts
    assert scope._tape.account.held == 0 and 0 < scope._tape.account.peak <= budget
    if NIGHTLY:
        assert last.resident <= first.resident + 40, parts


def resident() -> int:
    """Resident memory of this process, in MB; 0 where the system does not tell."""
    try:
        return next(int(line.split()[1]) // 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    except OSError:
        return 0
