"""The observer changes nothing: weights, generators and compiled graphs are the same with and without nanscope."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching.acting import OnNonFinite


def plain_loop(around: AbstractContextManager[object], steps: int = 10, checkpoint: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """A loop with dropout, in-place writes and a sampling phase; returns the weights and the generator state after it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with around:
        for _ in range(steps):
            ids = torch.randint(0, 20, (4, 9))
            with torch.no_grad():
                probabilities = model(ids[:, :-1]).softmax(-1)
                sampled = torch.multinomial(probabilities.flatten(0, 1), 1).view(4, 8)
                rewards = (sampled == 3).float().sum(-1)
                advantages = torch.zeros(4)
                advantages[:] = rewards - rewards.mean()
                advantages /= rewards.std() + 1e-4
            hidden = ids[:, :-1]
            logits = torch.utils.checkpoint.checkpoint(model, hidden, use_reentrant=False) if checkpoint else model(hidden)
            logps = nn.functional.dropout(logits, 0.1).log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(logps - logps.detach())
            loss = -(ratio * advantages[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], [torch.get_rng_state(), torch.rand(3)]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("mode", ["record", "skip", "stop", "repair"])
def test_a_plain_loop_with_dropout_is_bit_identical(tmp_path: Path, mode: OnNonFinite, checkpoint: bool) -> None:
    """Weights and random numbers after ten steps do not depend on being watched."""
    bare = plain_loop(nullcontext(), checkpoint=checkpoint)
    states = random.getstate(), np.random.get_state()[1].tolist()
    watched = plain_loop(nanscope.watch(out=tmp_path, on_nonfinite=mode), checkpoint=checkpoint)
    for one, other in zip(bare[0] + bare[1], watched[0] + watched[1], strict=True):
        assert torch.equal(one, other)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_nested_scopes_are_bit_identical(tmp_path: Path) -> None:
    """Two scopes around one loop change as little as one."""

    class Both:
        def __enter__(self) -> None:
            self.scopes = [nanscope.watch(out=tmp_path / "a"), nanscope.watch(out=tmp_path / "b")]
            for scope in self.scopes:
                scope.__enter__()

        def __exit__(self, *error: object) -> None:
            for scope in reversed(self.scopes):
                scope.__exit__(None, None, None)
            assert [scope.steps for scope in self.scopes] == [10, 10]

    bare, watched = plain_loop(nullcontext()), plain_loop(Both())
    assert all(torch.equal(a, b) for a, b in zip(bare[0], watched[0], strict=True))


def compiled_run(watch: Callable[[], AbstractContextManager[object]], backend: object) -> tuple[list[float], list[Tensor]]:
    torch._dynamo.reset()

    def grpo_loss(logps: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    compiled = torch.compile(grpo_loss, backend=backend)  # type: ignore[arg-type]
    torch.manual_seed(0)
    weight = torch.randn(6, requires_grad=True)
    losses = []
    with watch():
        for _ in range(4):
            loss = compiled(weight.log_softmax(-1), torch.full((6,), -2.0), torch.linspace(-1, 1, 6))
            loss.backward()
            losses.append(float(loss.detach()))
    assert weight.grad is not None
    return losses, [weight.grad.clone()]


def test_a_compiled_loss_is_compiled_as_often_and_gives_the_same(tmp_path: Path) -> None:
    """A torch.compile'd loss stays compiled: same number of frames and graphs, same numbers, gradients included."""
    from torch._dynamo.testing import CompileCounterWithBackend

    results = []
    for watch in (nullcontext, lambda: nanscope.watch(out=tmp_path)):
        counter = CompileCounterWithBackend("aot_eager")
        losses, grads = compiled_run(watch, counter)
        results.append((counter.frame_count, counter.op_count, losses, grads[0].tolist()))
    assert results[0] == results[1]
    assert results[0][0] == 1


def test_an_inductor_loss_runs_compiled_and_gives_the_same(tmp_path: Path) -> None:
    """With the real compiler the loss is one opaque call, and the numbers are the compiled ones."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False}):  # else the compiler first builds a program for each instruction set, to see it run
        bare = compiled_run(nullcontext, "inductor")
        watched = compiled_run(lambda: nanscope.watch(out=tmp_path), "inductor")
    assert bare[0] == watched[0]
    assert torch.equal(bare[1][0], watched[1][0])


def test_a_compiled_model_is_compiled_as_often(tmp_path: Path) -> None:
    """A compiled module inside the block is compiled as often as outside, and trains to the same weights."""
    from torch._dynamo.testing import CompileCounterWithBackend

    results = []
    for watch in (nullcontext, lambda: nanscope.watch(out=tmp_path)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch():
            for _ in range(4):
                optimizer.zero_grad()
                compiled(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
        results.append((counter.frame_count, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_buffers_do_not_move_when_a_module_is_looked_at_twice(tmp_path: Path) -> None:
    """A second look runs a module again; batch-norm statistics and the generator stay where they were."""

    def run(around: AbstractContextManager[object]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        states = []
        with around:
            for step in range(3):
                inputs = torch.randn(8, 4)
                if step == 2:
                    inputs[0, 0] = float("inf")
                optimizer.zero_grad()
                model(inputs).sum().backward()
                states.append(torch.get_rng_state())
        return [copy.deepcopy(b) for b in model.buffers()], states[-1]

    bare, watched = run(nullcontext()), run(nanscope.watch(out=tmp_path))
    assert all(torch.equal(a, b) or (torch.isnan(a) & torch.isnan(b)).any() for a, b in zip(bare[0], watched[0], strict=True))
    assert torch.equal(bare[1], watched[1])
