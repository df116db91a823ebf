"""The wrapper of torch.autograd.backward takes every form that torch takes, and refuses what torch refuses, in its words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import nanscope
from tests.loops import grpo_steps, policy, stale_at

one = torch.ones(())
back = torch.autograd.backward

# w: a leaf; y, z: two scalars of it. Called through the module, as trainers do.
FORMS: dict[str, Callable[..., object]] = {
    "keyword": lambda go, w, y, z: go(tensors=y),
    "keywords": lambda go, w, y, z: go(tensors=[y, z], grad_tensors=[one, None]),
    "tuple": lambda go, w, y, z: go((y, z)),
    "generator": lambda go, w, y, z: go(t for t in (y, z)),
    "generator of seeds": lambda go, w, y, z: go((y, z), (t for t in (None, one))),
    "iterator": lambda go, w, y, z: go(iter([y, z])),
    "set": lambda go, w, y, z: go({y}),
    "edge": lambda go, w, y, z: go(get_gradient_edge(y), one),
    "edge without a seed": lambda go, w, y, z: go(get_gradient_edge(y)),
    "edge and tensor": lambda go, w, y, z: go([get_gradient_edge(y), z], [one, None]),
    "inputs": lambda go, w, y, z: go(y, inputs=[w]),
    "inputs by position": lambda go, w, y, z: go(y, None, None, False, None, [w]),
    "inputs by name": lambda go, w, y, z: go(y, inputs={"w": w}),
    "inputs of a generator": lambda go, w, y, z: go(y, inputs=(t for t in [w])),
    "no inputs": lambda go, w, y, z: go(y, inputs=[]),
    "old keyword": lambda go, w, y, z: go(y, grad_variables=one),
    "old and new keyword": lambda go, w, y, z: go(y, one, grad_variables=one),
    "graph kept": lambda go, w, y, z: (go(y, retain_graph=True), go(y)),
    "graph gone": lambda go, w, y, z: (go(y), go(y)),
    "graph made": lambda go, w, y, z: go(y * y, create_graph=True),
    "vector": lambda go, w, y, z: go(w * 2),
    "vector and seed": lambda go, w, y, z: go(w * 2, torch.ones(3)),
    "wrong seed": lambda go, w, y, z: go(w * 2, torch.ones(4)),
    "too many seeds": lambda go, w, y, z: go([y], [None, None]),
    "seed that is none": lambda go, w, y, z: go([y], 3),
    "empty": lambda go, w, y, z: go([]),
    "nothing": lambda go, w, y, z: go(),
    "None": lambda go, w, y, z: go(None),
    "text": lambda go, w, y, z: go("y"),
    "number": lambda go, w, y, z: go(3),
    "lists in lists": lambda go, w, y, z: go([[y]]),
    "dict": lambda go, w, y, z: go({y: 1}),
    "no gradient": lambda go, w, y, z: go(torch.ones(())),
    "integers": lambda go, w, y, z: go(torch.ones((), dtype=torch.long)),
    "wrong keyword": lambda go, w, y, z: go(y, sideways=True),
    "method": lambda go, w, y, z: y.backward(inputs=[w], retain_graph=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_backward_is_torchs_own(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str) -> None:
    """The same gradients, or the same error with the same message; and nothing of ours fails."""

    def run(around: AbstractContextManager[object]) -> tuple[object, ...]:
        w = torch.ones(3, requires_grad=True)
        with warnings.catch_warnings(record=True) as warned, around:
            warnings.simplefilter("always")
            try:
                FORMS[form](torch.autograd.backward, w, (w * 2).sum(), (w * 3).sum())
                error = None
            except Exception as raised:
                error = (type(raised), str(raised), raised.__context__)
        return error, w.grad if w.grad is None else w.grad.tolist(), [(warning.category, warning.filename) for warning in warned]

    bare, watched = run(nullcontext()), run(nanscope.watch(out=tmp_path))
    assert watched[:2] == bare[:2]
    if not form.startswith(("old", "graph made")):  # torch names who called, and that is us; and some things it says only once
        assert watched[2] == bare[2]
    assert "nanscope [" not in caplog.text


def test_a_backward_pass_from_an_edge_is_one_that_was_watched(tmp_path: Path) -> None:
    """Nothing is known of its loss; NaN gradients are the step's own, and nobody says that no backward pass made them."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        loss = model(torch.ones(1, 2)).sum() * float("nan")
        torch.autograd.backward(get_gradient_edge(loss), torch.ones(()))
        optimizer.step()
    assert scope.bad_steps == 1
    assert not any(note.slug == "foreign_gradients" for note in scope.notes)


def test_a_backward_pass_that_raised_leaves_the_watch_awake(tmp_path: Path) -> None:
    """The loop catches it and goes on: the model's next calls are seen as before, and its next bad step is explained."""

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise MemoryError

    model = policy()
    with nanscope.watch(out=tmp_path) as scope:
        with pytest.raises(MemoryError):
            Refuses.apply(model(torch.tensor([[1, 2]]))).sum().backward()
        logits = model(torch.tensor([[1, 2]]))
        assert scope._modules.output_of(logits) == "Sequential"
        grpo_steps(model, 3, stale_at(0, 3))
    assert scope.verdict.incidents[0].origin.variable == "ratio"


def test_a_thread_that_calls_the_same_model_does_not_put_the_tape_to_sleep(tmp_path: Path) -> None:
    """A module that is open here and called in another thread is closed here when it returns here."""
    import threading

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if again:
                other = threading.Thread(target=lambda: self(x, False))
                other.start()
                other.join()
            return x * self.weight

    model = Waits()
    with nanscope.watch(out=tmp_path) as scope:
        loss = (model(torch.ones(2)) * 1000).exp().sum()
        assert not scope._mode.sleeping
        loss.backward()
    assert scope.verdict.incidents[0].origin.op == "exp"
