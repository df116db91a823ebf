"""What a row of the corpus is: a subject, its programs, their bugs, and how a healthy batch is brought to the edge.

A program is a plain torch function of named tensors: `program.loss(**program.batch())` is finite, and so is its gradient for every tensor that
asks for one. With `bug.trigger(program.batch())`, a batch within `program.bounds`, one of the two is not; of `program.mended` both are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]  # of the tensors of a batch, by name; a scalar
Trigger = Callable[[Batch], Batch]  # of a healthy batch: one that makes the bug show


class Kind(StrEnum):
    """What an operator meets at its edge."""

    LOG_OF_ZERO = "log of zero"
    EXP_OVERFLOW = "exp overflows"
    DIVISION_BY_ZERO = "division by zero"
    SQRT_OF_ZERO = "sqrt of zero"


@dataclass(frozen=True, slots=True)
class Bug:
    """One operator that goes wrong."""

    name: str  # as in the paper: subject and letter
    op: str  # as torch calls it
    kind: Kind
    line: str  # stripped text of the line of formulas.py that calls it
    trigger: Trigger
    number: int = 1  # which call of that operator on its line, in the order of the run, counted from 1
    silent: bool = False  # the loss stays finite whenever this operator goes wrong; only the gradient tells
    unseen: Trigger | None = (
        None  # of a bug that is not silent: a batch whose loss is finite, and whose gradient is not because of this operator
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One loss of a subject, and its mended twin.

    It may meet other edges than those of its rows (a logistic loss has a second logarithm, a machine's energy is taken twice); its twin meets none.
    """

    script: str  # in the GRIST repository, under scripts/study_case; where the formula is taken from elsewhere, that
    loss: Loss
    mended: Loss
    fix: str  # what the twin does instead, and whose fix that is
    batch: Callable[[], Batch]  # seeded; what the loss learns asks for a gradient
    bounds: dict[str, tuple[float, float]]  # what training can reach, of every tensor of floats but labels
    bugs: tuple[Bug, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the 63 programs of the paper."""

    number: int
    name: str
    what: str
    source: str  # where its authors keep it; "" if nobody could say (RANUM's study looked for each)
    programs: tuple[Program, ...]


def healthy(
    inputs: dict[str, tuple[int, ...]],
    learnt: dict[str, tuple[int, ...]],
    *,
    labels: int = 0,
    index: bool = False,
    within: tuple[float, float] = (0.0, 1.0),
    around: dict[str, float] | None = None,
    more: Batch | None = None,
) -> Callable[[], Batch]:
    """A maker of batches: inputs uniform `within`, parameters of deviation 0.1 `around` a value (0 if none is given), random labels.

    inputs, learnt: shape of every tensor, by name. labels: of how many classes (none if 0), one-hot or as an `index`. more: tensors taken as they are.
    """

    def batch() -> Batch:
        generator = torch.Generator().manual_seed(0)
        low, high = within
        made = {name: low + (high - low) * torch.rand(shape, generator=generator) for name, shape in inputs.items()}
        for name, shape in learnt.items():
            made[name] = (0.1 * torch.randn(shape, generator=generator) + (around or {}).get(name, 0.0)).requires_grad_()
        if labels:
            classes = torch.randint(labels, (next(iter(made.values())).shape[0],), generator=generator)
            made["labels"] = classes if index else torch.eye(labels)[classes]
        return made | {name: tensor.clone() for name, tensor in (more or {}).items()}

    return batch


def changed(batch: Batch, values: dict[str, float | Tensor]) -> Batch:
    """The batch with the named tensors holding these values; what asked for a gradient still does."""
    new = {
        name: torch.as_tensor(value, dtype=batch[name].dtype).expand(batch[name].shape).clone().requires_grad_(batch[name].requires_grad)
        for name, value in values.items()
    }
    return batch | new


def setting(**values: float | Tensor) -> Trigger:
    """These values in the named tensors, broadcast; the others as they are."""
    return lambda batch: changed(batch, values)


def driven(*logits: float, label: int | None = 1, inputs: float = 1.0, features: float | None = None) -> Trigger:
    """The logits of every row are these, the last one repeated over the classes that are left, and every row's label is `label`.

    inputs:   what every input (the tensors that ask for no gradient) is set to.
    features: what then reaches the last layer, whose `weight` [features, classes] makes the logits. Layers before it have weights of 0
              and biases of 1, so that it is 1 after a ReLU; `inputs` where there is no such layer.
    """

    def trigger(batch: Batch) -> Batch:
        width, classes = batch["weight"].shape
        row = torch.tensor((logits + logits[-1:] * classes)[:classes])
        values: dict[str, float | Tensor] = {}
        for name, tensor in batch.items():
            if name == "labels":
                if label is not None:
                    values[name] = torch.eye(classes)[label] if tensor.is_floating_point() else torch.tensor(label)
            elif not tensor.requires_grad:
                if tensor.is_floating_point():
                    values[name] = inputs
            elif name != "weight":
                values[name] = float(name.endswith("_bias"))
        values["weight"] = row / (width * (inputs if features is None else features))
        return changed(batch, values)

    return trigger
