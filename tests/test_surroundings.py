"""What surrounds a step: the trainer is found, its log is not believed, and settings and environment are JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nanscope
from nanscope.frameworks.rows import Framework
from nanscope.watching.surroundings import environment, find_trainer, logged_loss, sampled, settings

TINY = Framework("tiny", "tiny", "1.0", ("tiny/",), batch=("batch", "ids", "mask"))
IDS, MASK = torch.tensor([[1, 2]]), torch.tensor([[1, 0]])


@dataclass
class Trainer:
    """What a trainer looks like from outside."""

    args: Any = field(default_factory=lambda: SimpleNamespace(logging_nan_inf_filter=True))
    state: Any = None

    def train(self) -> Any:
        """Ask from below, as a hook does."""
        return find_trainer(())


def test_the_trainer_is_a_target_or_the_self_of_a_frame_above() -> None:
    """What has args and state, or a `self` with a trainer's args; None if there is none."""
    trainer = Trainer()
    assert find_trainer((torch.nn.Linear(1, 1), trainer)) is trainer
    assert trainer.train() is trainer
    assert Trainer(args=SimpleNamespace(lr=1.0)).train() is None
    assert find_trainer((object(),)) is None


def test_the_sampled_tokens_are_read_from_the_frameworks_local() -> None:
    """By the name that its row gives, from any frame above; without a mask the ids alone."""

    def inside(batch: Any) -> tuple[Tensor, Tensor | None] | None:
        return (lambda: sampled(TINY))()

    found = inside({"ids": IDS, "mask": MASK})
    assert found is not None and found[0] is IDS and found[1] is MASK
    for mask in ({}, {"mask": [1, 0]}):
        found = inside({"ids": IDS, **mask})
        assert found is not None and found[0] is IDS and found[1] is None
    assert inside({"ids": [1, 2]}) is None and inside([IDS]) is None
    assert sampled(None) is None and sampled(Framework("x", "x", "1", ())) is None


def trainer(shows: bool) -> Trainer:
    return Trainer(args=SimpleNamespace(logging_nan_inf_filter=shows))


def test_a_log_that_filters_is_contradicted() -> None:
    """It shows a finite number for a loss that is not, or a finite loss and nothing of the gradients."""
    ((slug, text),) = logged_loss(trainer(True), math.nan, True)
    assert (slug, text) == (
        "logged_loss",
        "the true loss is nan; the trainer's logging_nan_inf_filter keeps it out of the log, which shows a finite number",
    )
    ((slug, text),) = logged_loss(trainer(True), 0.12345678, False)
    assert slug == "logged_loss" and text.startswith("the logged loss (0.123457) is finite and does not show that the gradients are not")


@pytest.mark.parametrize(
    ("owner", "loss"), [(None, math.nan), (trainer(False), math.nan), (trainer(True), None), (Trainer(args=None), 1.0)]
)
def test_a_log_that_does_not_filter_needs_no_note(owner: Any, loss: float | None) -> None:
    """Nor does a run without a trainer or a step without a loss."""
    assert logged_loss(owner, loss, True) == []


class Kind(Enum):
    """An option as trainers have them."""

    GRPO = "grpo"


def test_settings_are_json() -> None:
    """Those of the names that the trainer has; what JSON does not hold as text."""
    args = SimpleNamespace(beta=0.04, steps=3, bf16=True, name="x", none=None, kind=Kind.GRPO, secret="y", path=[1])
    found = settings(Trainer(args=args), ("beta", "steps", "bf16", "name", "none", "kind", "path", "missing"))
    assert found == {"beta": 0.04, "steps": 3, "bf16": True, "name": "x", "none": None, "kind": "Kind.GRPO", "path": "[1]"}
    assert json.loads(json.dumps(found)) == found
    assert settings(None, ("beta",)) == {} and settings(Trainer(args=args), ()) == {}


def test_the_environment_is_what_a_stranger_asks_first() -> None:
    """Versions of what is installed, device, dtype, threads."""
    found = environment(torch.zeros((), dtype=torch.bfloat16), "pytest")
    assert json.loads(json.dumps(found)) == found
    assert (found["device"], found["dtype"], found["threads"]) == ("cpu", "bfloat16", torch.get_num_threads())
    assert found["python"] == ".".join(str(n) for n in sys.version_info[:3]) and found["deterministic"] is False
    assert found["versions"]["pytest"] == pytest.__version__ and found["versions"]["nanscope"] == nanscope.__version__
    nobody = environment(None, "no-such-distribution")
    assert "no-such-distribution" not in nobody["versions"] and nobody["dtype"] == "float32"
    assert "pytest" not in environment(None, None)["versions"]
