"""A run that an exception ends which speaks of numbers: what was refused is told, and where it came from."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

import nanscope


class Policy(nn.Module):
    """Builds its distribution inside, where the tape does not listen."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(4, 2), scale

    def forward(self, seen: Tensor) -> Normal:
        mean = self.mean(seen)
        return Normal(mean + (mean / self.scale - mean / self.scale), torch.ones(2))


def train(model: nn.Module, batch: Callable[[int], Tensor], loss_of: Callable[[nn.Module, Tensor], Tensor], out: Path) -> nanscope.Scope:
    """Three steps, of which the last raises."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = nanscope.watch(model, out=out)
    with pytest.raises((ValueError, RuntimeError, LookupError, AssertionError)), scope:
        for step in range(3):
            loss = loss_of(model, batch(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return scope


def sampled(model: nn.Module, seen: Tensor) -> Tensor:
    policy = model(seen)
    loss: Tensor = -policy.log_prob(policy.sample()).mean()
    return loss


def spoilt(step: int) -> Tensor:
    seen = torch.randn(8, 4)
    if step == 2:
        seen[3, 1] = math.nan
    return seen


def read(step: int) -> Tensor:
    return torch.from_numpy(spoilt(step).numpy().copy())


@pytest.mark.parametrize("batch", [spoilt, read])
def test_an_observation_that_a_distribution_inside_a_model_refuses_is_named(batch: Callable[[int], Tensor], tmp_path: Path) -> None:
    scope = train(Policy(), batch, sampled, tmp_path)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.index, incident.origin.shape) == (3, (3, 1), (8, 4)), incident.sentence
    assert (incident.phase, incident.origin.variable, incident.origin.file) == ("input", "seen", __file__)
    assert any(note.text.startswith("the run ended there: ValueError: Expected parameter loc") for note in incident.notes)
    assert "The loss" not in incident.sentence


def test_what_a_model_makes_bad_and_refuses_itself_is_told_as_that(tmp_path: Path) -> None:
    scope = train(Policy(0.0), lambda step: torch.randn(8, 4), sampled, tmp_path)
    (incident,) = scope.verdict.incidents
    assert incident.phase == "forward" and "loc" in incident.sentence, incident.sentence


def test_weights_that_are_bad_when_a_model_refuses_are_told(tmp_path: Path) -> None:
    model = Policy()
    with torch.no_grad():
        model.mean.weight[1, 2] = math.nan
    incident, *_ = train(model, lambda step: torch.randn(8, 4), sampled, tmp_path).verdict.incidents
    assert (incident.phase, incident.origin.variable, incident.origin.index) == ("weights", "mean.weight", (1, 2))


def test_a_weight_of_a_model_that_is_called_for_the_first_time_has_its_name(tmp_path: Path) -> None:
    """Written to before anybody met the model, and no target was given."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    scope = nanscope.watch(out=tmp_path)
    with pytest.raises(ValueError, match="Expected parameter"), scope:
        with torch.no_grad():
            model[0].weight[1, 2] = math.nan
        seen = torch.randn(5, 4)
        Normal(model(seen), torch.ones(2))
    incident, *_ = scope.verdict.incidents
    assert (incident.phase, incident.origin.variable, incident.origin.index) == ("weights", "0.weight", (1, 2)), incident.sentence


def drawn(model: nn.Module, seen: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(model(seen) / torch.tensor(0.0), -1), 1).float().mean()


def of_a_root(model: nn.Module, seen: Tensor) -> Tensor:
    return functional.binary_cross_entropy(torch.sqrt(-model(seen).square() - 0.1), torch.ones(8, 2))


def by_an_index(model: nn.Module, seen: Tensor) -> Tensor:
    support = torch.sqrt(-model(seen).square().detach() - 0.1)
    return model(seen).flatten()[support.floor().long().flatten()].mean()


@pytest.mark.parametrize(("loss_of", "op"), [(drawn, "div"), (of_a_root, "sqrt"), (by_an_index, "sqrt")])
def test_what_torch_refuses_is_followed_to_the_line_that_made_it(
    loss_of: Callable[[nn.Module, Tensor], Tensor], op: str, tmp_path: Path
) -> None:
    """No backward pass, no loss: the exception is all there is."""
    scope = train(nn.Linear(4, 2), lambda step: torch.randn(8, 4), loss_of, tmp_path)
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.file) == ("forward", op, __file__), incident.sentence


def test_an_exception_that_says_nothing_of_numbers_blames_none(tmp_path: Path) -> None:
    """NaN in a metric that nobody needs is no reason for a missing key."""

    def loss_of(model: nn.Module, seen: Tensor) -> Tensor:
        metric = seen[:0].mean()
        assert bool(metric.isnan())
        raise KeyError("advantages")

    scope = train(nn.Linear(4, 2), lambda step: torch.randn(8, 4), loss_of, tmp_path)
    assert not scope.verdict.incidents and not scope.snapshots


def test_a_script_that_dies_under_the_launcher_is_told_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    logits = model(torch.ones(5, 4)) / (0.0 if step == 2 else 1.0)\n"
        "    torch.multinomial(logits.softmax(-1), 1)\n"
        "    logits.log_softmax(-1)[:, 0].mean().backward()\n"
        "    optimizer.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "nanscope", "run", "--out", str(tmp_path / "runs"), "--", "python", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "probability tensor contains" in done.stderr and done.returncode == 1
    told = " ".join((done.stdout + done.stderr).split())
    assert "step 3 · rank 0 · forward" in told and "logits" in told and "train.py:5" in told, told
