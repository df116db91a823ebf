"""Verdicts of every kind, from small training steps that go wrong, and hostile ones: what the tests of all renderers begin with."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import torch
from recorded import record
from steps import RUNS, clipped

import nanscope
from nanscope.program.program import Program
from nanscope.snapshot.observation import Observation, Origin, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict import incident, standing
from nanscope.verdict.diagnose import verdict as diagnosed
from nanscope.verdict.distribution import Histogram
from nanscope.verdict.incident import Incident, Note, Verdict
from nanscope.verdict.tokens import RECORDED, TokenMap, Track, Window

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


ENVIRONMENT = {"versions": {"torch": "1.2.3"}, "python": "3.0", "device": "cpu"}


def still(incident: Incident) -> Incident:
    """Return an incident without what differs from one machine to the next."""
    path = incident.snapshot and f"nanscope-runs/{Path(incident.snapshot).name}"
    return dataclasses.replace(incident, environment=ENVIRONMENT if incident.environment else {}, snapshot=path)


def still_verdict(found: Verdict) -> Verdict:
    """Return a verdict without what differs from one machine, and one version, to the next."""
    return dataclasses.replace(found, incidents=tuple(map(still, found.incidents)), version="0.0")


def ppo_step(environment: dict[str, Any]) -> Snapshot:
    """Return a recorded step of PPO whose last token, which does not count, overflows."""
    log_probs = torch.linspace(-2.0, -0.5, 12).reshape(3, 4).requires_grad_()
    old_log_probs, mask = torch.linspace(-2.1, -0.4, 12).reshape(3, 4), torch.ones(3, 4)
    advantages = torch.tensor([[1.0], [-0.5], [0.25]])
    old_log_probs[2, 3], mask[2, 3] = -120.0, 0.0
    return record(clipped, log_probs, old_log_probs, advantages, mask).snapshot(environment=environment)


def incident_of(kind: str = "forward masked", **changes: Any) -> Incident:
    """Return the first incident of this kind, changed."""
    return dataclasses.replace(verdict_of(kind).incidents[0], **changes)


NASTY = (
    "</script></style></title>\"'><img src=x onerror=alert(1)><script>alert(2)</script>{{ 7*7 }}{% raw %}$\\frac{a}$"
    "\x00\x1b[31m\x9b\u202e\u2066\u200b\u2028\ud800"
)


def hostile(kind: Any = Verdict, text: str = NASTY, count: int = 2) -> Any:
    """Build a value of a type, with hostile text wherever a string fits; count: items in every list."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind, vars(incident) | vars(standing) | {"Any": Any})
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


def _tokens(text: str) -> TokenMap:
    """A map of three tokens, in which whatever is text is hostile."""
    cells = (((math.inf, -1.0, math.nan),),)
    track = Track(
        text,
        text,
        False,
        88.7,
        2,
        1,
        -1.0,
        -1.0,
        -1.0,
        -1.0,
        -1.0,
        (-1.0, 1.0),
        Histogram(-1.0, 1.0, (1, 0), (0, 1)),
        {RECORDED: cells, text: cells},
    )
    window = Window(0, 0, 1, 3, ((True, False, False),))
    return TokenMap(
        1, 3, 0, 0, 0, (window,), (track, track), 0, ((1, 0, 1),), 1, 1, ((1.0, 0.0, 0.0),), ((0, 1, 1),), {RECORDED: text, text: text}
    )


def _field(owner: str, name: str, hint: Any, text: str, count: int) -> Any:
    special: dict[tuple[str, str], Any] = {
        ("Incident", "tokens"): _tokens(text) if (owner, name) == ("Incident", "tokens") else None,
        ("Row", "kind"): "fix",
        ("Row", "works"): True,
        ("Row", "bad"): 0,
        ("Row", "loss"): 0.5,
        ("Incident", "reached"): {"loss": text, "gradients": [text, text], "weights": text, "stepped": text, text: text},
    }
    return special[owner, name] if (owner, name) in special else hostile(hint, text, count)
