"""Verdicts of every kind, from small training steps that go wrong, and hostile ones: what the tests of all renderers begin with.

Golden outputs name the lines of this file: who adds a step adds it at the end of the steps, and accepts the change.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import tempfile
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from recorded import record

import nanscope
from nanscope.program.program import Program
from nanscope.snapshot.observation import Observation, Origin, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict import incident
from nanscope.verdict.diagnose import verdict as diagnosed
from nanscope.verdict.incident import Note, Verdict


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def _mask_after(step: int = 0) -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[1, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[1, 2] = -120.0
    logps = model(x).squeeze(-1)
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    loss = -(ratio * mask).sum() / mask.sum()
    loss.backward()


def _finite_loss() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, 1] = False
    logps = model(x).squeeze(-1)
    log_ratio = torch.where(mask, logps, logps + 150.0)
    ratio = torch.exp(log_ratio)
    loss = -torch.where(mask, ratio, 0.0).mean()
    loss.backward()


def _bad_input() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[0, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[0, 2] = math.nan
    ratio = torch.exp(model(x).squeeze(-1) - old_logps)
    loss = -(ratio * mask).mean()
    loss.backward()


def _optimizer() -> None:
    model = _model().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-9, foreach=False)
    loss = model(torch.full((1, 4), 1e-4, dtype=torch.float16)).sum()
    loss.backward()
    optimizer.step()


def _drifting() -> None:
    """Nine healthy steps whose masked exponents grow, and one too many."""
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mask, offset = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 10.0]])
    for step in range(10):
        logps = model(x).squeeze(-1)
        old_logps = logps.detach() - step * offset
        ratio = torch.exp(logps - old_logps)
        loss = -(ratio * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _healthy() -> None:
    loss = _model()(torch.ones(3, 4)).sum()
    loss.backward()


RUNS: dict[str, Callable[[], None]] = {
    "forward masked": _mask_after,
    "backward, finite loss": _finite_loss,
    "input": _bad_input,
    "optimizer": _optimizer,
    "history": _drifting,
    "healthy": _healthy,
}
KINDS = (*RUNS, "observed only", "absorbed")


@functools.cache
def verdict_of(kind: str) -> Verdict:
    """Return a verdict of this kind, from a real run where there is one."""
    if kind == "absorbed":
        return Verdict((), (Note("nonfinite_absorbed", "ratio was +inf at [0, 1], and it was absorbed", 3),), steps=12, version="0.1.0")
    if kind == "observed only":
        origin = Origin("module", (0, 1, 2), (2, 3, 4), math.nan, "bfloat16", "logits")
        snapshot = Snapshot(
            step=7, rank=3, program=Program((), (), -1), tensors={}, loss=torch.tensor(math.nan), grads={},
            reached=Reached(loss=math.nan, gradients=4, bad_gradients=4), observation=Observation(phase=Phase.FORWARD, origin=origin),
        )  # fmt: skip
        return diagnosed([snapshot], steps=7, bad_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        with nanscope.watch(out=folder) as scope:
            RUNS[kind]()
        return scope.verdict


def ppo_step(environment: dict[str, Any]) -> Snapshot:
    """Return a recorded step of PPO whose last token, which does not count, overflows."""
    log_probs = torch.linspace(-2.0, -0.5, 12).reshape(3, 4).requires_grad_()
    old_log_probs, mask = torch.linspace(-2.1, -0.4, 12).reshape(3, 4), torch.ones(3, 4)
    advantages = torch.tensor([[1.0], [-0.5], [0.25]])
    old_log_probs[2, 3], mask[2, 3] = -120.0, 0.0

    def loss(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ratio = torch.exp(log_probs - old_log_probs)
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(surrogate * mask).sum() / mask.sum()

    return record(loss, log_probs, old_log_probs, advantages, mask).snapshot(environment=environment)


NASTY = (
    "</script></style></title>\"'><img src=x onerror=alert(1)><script>alert(2)</script>{{ 7*7 }}{% raw %}$\\frac{a}$"
    "\x00\x1b[31m\x9b\u202e\u2066\u200b\u2028\ud800"
)


def hostile(kind: Any = Verdict, text: str = NASTY, count: int = 2) -> Any:
    """Build a value of a type, with hostile text wherever a string fits; count: items in every list."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind, vars(incident) | {"Any": Any})
        return kind(**{field.name: _field(kind.__name__, field.name, hints[field.name], text, count) for field in dataclasses.fields(kind)})
    if origin in (typing.Union, types.UnionType):
        return hostile(next(arg for arg in args if arg is not type(None)), text, count)
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(hostile(args[0], text, count) for _ in range(count))
    if origin is tuple:
        return tuple(hostile(arg, text, count) for arg in args)
    if origin is dict or kind is Any:
        return {f"{text}{n}": [text, {text: text}, math.nan, None, True] for n in range(count)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {str: text, int: 1, float: math.inf, bool: True}[kind]


def _field(owner: str, name: str, hint: Any, text: str, count: int) -> Any:
    special: dict[tuple[str, str], Any] = {
        ("Row", "kind"): "fix",
        ("Row", "works"): True,
        ("Row", "bad"): 0,
        ("Row", "loss"): 0.5,
        ("Incident", "reached"): {"loss": text, "gradients": [text, text], "weights": text, "stepped": text, text: text},
    }
    return special[owner, name] if (owner, name) in special else hostile(hint, text, count)
