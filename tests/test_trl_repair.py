"""TRL, really training, under `on_nonfinite="repair"`: a run whose source has a fault ends with the weights of the one whose source has the fix.

The source of TRL's own `_compute_loss` is taken, and one expression in it is changed: where TRL lacks a guard it is written in, where TRL
has one it is taken out. Every other line is TRL's, and so is all that is watched.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl")

from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl_runs import EditedTrainer, Inputs, make_trainer  # noqa: E402

import nanscope  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:std")  # of a group of one, which is what the test is about

TRL_ITSELF = ("", "")


class Edited(EditedTrainer, GRPOTrainer):
    """GRPO whose loss reads edited inputs."""


def with_source(old: str, new: str) -> type[Any]:
    """TRL's trainer with one expression of its loss written otherwise, at the line where it stands."""
    if not old:
        return Edited
    lines, first = inspect.getsourcelines(GRPOTrainer._compute_loss)
    source = "".join(lines)
    assert old in source
    namespace: dict[str, Any] = {}
    text = "\n" * (first - 2) + "class Written:\n" + source.replace(old, new, 1)
    exec(compile(text, str(grpo_trainer.__file__), "exec"), vars(grpo_trainer), namespace)
    return type("Changed", (EditedTrainer, type("Inner", (GRPOTrainer,), {"_compute_loss": namespace["Written"]._compute_loss})), {})


def stale(name: str, by: float, masked: bool = True) -> Callable[[Any, Inputs], Inputs]:
    """Shift one log-prob at a token that the loss does not count, or does, from the second step on."""

    def edit(trainer: Any, inputs: Inputs) -> Inputs:
        if trainer.state.global_step < 1:
            return inputs
        row = int(inputs["completion_mask"].sum(-1).argmax())
        column = int(inputs["completion_mask"][row].sum()) // 2
        if masked:
            inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
            inputs["tool_mask"][row, column] = 0
        inputs[name] = inputs[name].clone()
        inputs[name][row, column] += by
        return inputs

    return edit


def empty(trainer: Any, inputs: Inputs) -> Inputs:
    """Nothing is counted, in the second step."""
    if trainer.state.global_step == 1:
        inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    return inputs


def empty_row(trainer: Any, inputs: Inputs) -> Inputs:
    if trainer.state.global_step >= 1:
        inputs["completion_mask"] = inputs["completion_mask"].clone()
        inputs["completion_mask"][3] = 0
    return inputs


@dataclass(frozen=True)
class Case:
    """faulty, mended: an expression of TRL's, and what stands in its place in the one trainer and in the other."""

    faulty: tuple[str, str]
    mended: tuple[str, str]
    edit: Callable[[Any, Inputs], Inputs]
    fix: str
    settings: dict[str, Any] = field(default_factory=dict)


RATIO = "coef_1 = torch.exp(log_importance_weights)"
KL = "torch.exp(ref_per_token_logps - per_token_logps) -"
BY_BATCH = "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)"
BY_ROW = "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
GROUPS = 'advantages = inputs["advantages"]'
STD = 'advantages = (inputs["advantages"] - inputs["advantages"].view(-1, 1).mean(1)) / (inputs["advantages"].view(-1, 1).std(1{}) + 1e-4)'
CASES = {
    "masked exp": Case(
        TRL_ITSELF,
        (RATIO, "coef_1 = torch.exp(torch.where(mask != 0, log_importance_weights, 0.0))"),
        stale("old_per_token_logps", -200.0),
        "mask_before_op",
    ),
    "k3": Case(
        TRL_ITSELF,
        (KL, "torch.exp(torch.where(mask != 0, ref_per_token_logps - per_token_logps, 0.0)) -"),
        stale("ref_per_token_logps", 200.0),
        "mask_before_op",
        {"beta": 0.04},
    ),
    "sequence ratio": Case(
        TRL_ITSELF,
        (RATIO, "coef_1 = torch.exp(torch.clamp(log_importance_weights, -20.0, 20.0))"),
        stale("old_per_token_logps", -2000.0, masked=False),
        "clamp_exponent",
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    ),
    "empty mask": Case((BY_BATCH, BY_BATCH.replace(".clamp(min=1.0)", "")), TRL_ITSELF, empty, "clamp_denominator", {"loss_type": "bnpo"}),
    "empty row": Case((BY_ROW, BY_ROW.replace(".clamp(min=1.0)", "")), TRL_ITSELF, empty_row, "clamp_denominator", {"loss_type": "grpo"}),
    "std of one": Case(
        (GROUPS, STD.format("")), (GROUPS, STD.format(", correction=0")), lambda trainer, inputs: inputs, "guard_small_group"
    ),
}


HEALTHY = Case(TRL_ITSELF, TRL_ITSELF, lambda trainer, inputs: inputs, "")


def run(path: Path, expression: tuple[str, str], case: Case, around: Any, **further: Any) -> list[Tensor]:
    trainer = make_trainer(path, with_source(*expression), max_steps=5, **case.settings, **further)
    trainer.edit = case.edit
    with around:
        trainer.train()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_faulty_run_ends_with_the_weights_of_the_mended_one(tmp_path: Path, name: str, accumulated: bool) -> None:
    """To the bit, since every edit is the same arithmetic as the fix in the source; no step is skipped."""
    case = CASES[name]
    further = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4} if accumulated else {}
    wanted = run(tmp_path / "mended", case.mended, case, nullcontext(), **further)
    scope = nanscope.watch(out=tmp_path / "runs", on_nonfinite="repair")
    got = run(tmp_path / "faulty", case.faulty, case, scope, **further)
    assert scope.repaired and not scope.skipped and not scope.verdict.gaps
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    repaired = [entry for entry in scope.history.entries if entry.stepped == "repaired"]
    assert repaired and all((entry.repaired or "").startswith(case.fix) for entry in repaired)
    assert all(entry.repaired_loss is not None and math.isfinite(entry.repaired_loss) for entry in repaired)


def test_a_run_whose_fault_has_no_proven_fix_ends_as_under_skip(tmp_path: Path) -> None:
    """A NaN that the source itself multiplies by, in one step: nothing is repaired, and weights and history are those of "skip"."""
    nan = (RATIO, f"{RATIO} * (float('nan') if self.state.global_step == 1 else 1.0)")
    runs = {}
    for mode in ("skip", "repair"):
        scope = nanscope.watch(out=tmp_path / mode / "runs", on_nonfinite=mode)  # type: ignore[arg-type]
        runs[mode] = run(tmp_path / mode, nan, HEALTHY, scope), scope
    (skipped, skip), (got, repair) = runs["skip"], runs["repair"]
    assert all(torch.equal(a, b) for a, b in zip(got, skipped, strict=True))
    assert (skip.skipped, repair.skipped, repair.repaired) == (1, 1, 0)
    assert [entry.stepped for entry in repair.history.entries] == [entry.stepped for entry in skip.history.entries]


def test_a_healthy_run_is_bit_identical_to_the_unwatched_one(tmp_path: Path) -> None:
    """With a KL term and several micro-batches."""
    settings = {"beta": 0.04, "gradient_accumulation_steps": 2}
    wanted = run(tmp_path / "bare", TRL_ITSELF, HEALTHY, nullcontext(), **settings)
    scope = nanscope.watch(out=tmp_path / "runs", on_nonfinite="repair")
    got = run(tmp_path / "watched", TRL_ITSELF, HEALTHY, scope, **settings)
    assert scope.verdict.healthy and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
