"""`nanscope.check`: a saved step, or a loss that is called once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded import record

import nanscope
from nanscope.causes import Cause
from nanscope.errors import NanscopeError
from nanscope.snapshot.file import save
from nanscope.watching.checking import recorded

INPUTS = {"x": torch.randn(3).requires_grad_(), "scale": torch.tensor(2.0)}


def own(x, scale):
    return torch.exp(x / scale).mean()


def test_a_function_is_called_once_with_its_inputs() -> None:
    """Its lines are told as those of a trainer would be."""
    found = nanscope.check(own, INPUTS)
    lines = {(hazard.cause, hazard.origin.expression) for hazard in found.reachable}
    assert (Cause.EXP_OVERFLOW, "torch.exp(x / scale)") in lines
    assert any(hazard.trigger.tensor == "scale" and hazard.trigger.value == 0 for hazard in found.hazards)
    assert INPUTS["x"].grad is None


def test_a_file_is_checked_as_its_step_is(tmp_path: Path) -> None:
    """By path, or loaded."""
    snapshot = record(own, *INPUTS.values()).snapshot()
    path = save(snapshot, tmp_path)
    found = nanscope.check(path)
    assert [h.trigger for h in found.hazards] == [h.trigger for h in nanscope.check(snapshot).hazards]
    assert found.to_json()["hazards"][0]["origin"]["op"]


@pytest.mark.parametrize("loss", [lambda x, scale: 1.0, lambda x, scale: x, lambda x, scale: x.detach().sum()])
def test_what_is_no_loss_is_refused(loss) -> None:
    """One number, with a gradient."""
    with pytest.raises(NanscopeError) as error:
        nanscope.check(loss, INPUTS)
    assert error.value.slug == "bad-loss"


def trusted(log_probs, old_log_probs):
    total = log_probs[0].sum() * 0.0
    for own, old in zip(log_probs, old_log_probs, strict=True):
        keep = (own.exp() - old.exp()).abs() < 0.2
        total = total - (keep * (own - old).exp()).sum()
    return total


def test_a_loss_of_many_calls_is_kept_whole() -> None:
    """A mask that is worked out from log-probs follows them when they are pushed, in the last row as in the first."""
    log_probs = -torch.rand(16, 3)
    step = recorded(trusted, {"log_probs": log_probs.requires_grad_(), "old_log_probs": log_probs.detach() - 0.05})
    assert {leaf.origin for leaf in step.program.leaves} == {"data"}
