"""The corpus of foresight holds: plain torch, without nanscope, sees every bug where its row says that it is, and none in the mended twin."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from foresight import formulas
from foresight.corpus import Batch, Bug, Kind, Loss, Program
from foresight.subjects import BUGS, BUGS_BESIDE, EXTRAS, PROGRAMS, SUBJECTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EVERY = [*BUGS, *BUGS_BESIDE]
by_bug = pytest.mark.parametrize(("bug", "program"), EVERY, ids=[bug.name for bug, _ in EVERY])
Place = tuple[str, str, int]  # operator, text of its line, which call of it on the line


def finite(*tensors: Tensor | None) -> bool:
    return all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors)


def gradients(loss: Tensor, batch: Batch) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, [tensor for tensor in batch.values() if tensor.requires_grad], allow_unused=True, retain_graph=True)


def harm(loss: Loss, batch: Batch) -> tuple[bool, bool]:
    """Is the loss finite, and is its gradient?"""
    value = loss(**batch)
    return finite(value), finite(*gradients(value, batch))


class Forward(TorchDispatchMode):
    """Notes the first call whose result is not finite though what it was given is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.born: Place | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        op, line = func._schema.name.removeprefix("aten::"), line_of(sys._getframe(1))
        self.calls[op, line] += 1
        if self.born is None and isinstance(result, Tensor) and not finite(result):
            self.born = (op, text_of(line), self.calls[op, line])
        return result


def line_of(frame: FrameType | None) -> int:
    while frame is not None and frame.f_code.co_filename != formulas.__file__:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


def text_of(line: int) -> str:
    return linecache.getline(formulas.__file__, line).strip()


def born(loss: Loss, batch: Batch) -> Place | None:
    """Where the first value that is not finite is made, forward or else backward."""
    with Forward() as forward:
        loss(**batch)
    return forward.born or born_backward(loss, batch)


def born_backward(loss: Loss, batch: Batch) -> Place | None:
    """The operator whose derivative makes of finite gradients one that is not."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # every node keeps the stack of the call that it differentiates
        value = loss(**batch)
    nodes, found = [value.grad_fn], []
    for node in nodes:
        nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    nodes.sort(key=lambda node: node._sequence_nr())
    calls: Counter[tuple[str, int]] = Counter()
    for node in nodes:
        op = node.name().removesuffix("0").removesuffix("Backward").lower()
        stack = [entry.split(", line ") for entry in node.metadata.get("traceback_", ()) if formulas.__file__ in entry]
        line = int(stack[-1][1].split(",")[0]) if stack else 0
        calls[op, line] += 1
        place = (op, text_of(line), calls[op, line])
        node.register_hook(lambda given, taken, place=place: found.append(place) if finite(*taken) and not finite(*given) else None)
    gradients(value, batch)
    return found[0] if found else None


def inside(batch: Batch, program: Program) -> bool:
    """Every tensor of floats within its bounds, to rounding."""
    return all(
        low * 1.001 <= tensor.min() and tensor.max() <= high * 1.001
        for name, (low, high) in program.bounds.items()
        if (tensor := batch[name]).numel()
    )


def test_the_corpus_is_that_of_the_paper() -> None:
    """63 subjects with 79 bugs, lettered where a subject has several."""
    assert [subject.number for subject in SUBJECTS] == list(range(1, 64))
    assert len(BUGS) == 79 == len({bug.name for bug, _ in BUGS})
    for subject in SUBJECTS:
        names = [bug.name for program in subject.programs for bug in program.bugs]
        assert names == ([str(subject.number)] if len(names) == 1 else [f"{subject.number}{letter}" for letter in "abcd"[: len(names)]])


def test_what_the_bugs_are() -> None:
    """The figures that are quoted: operators; bugs that never reach the loss; and those that some batch has in its gradient only."""
    assert Counter(bug.op for bug, _ in BUGS) == {"log": 59, "exp": 9, "div": 6, "sqrt": 5}
    assert {bug.op: bug.kind for bug, _ in EVERY} == {
        "log": Kind.LOG_OF_ZERO, "exp": Kind.EXP_OVERFLOW, "div": Kind.DIVISION_BY_ZERO, "sqrt": Kind.SQRT_OF_ZERO,
    }  # fmt: skip
    assert [bug.name for bug, _ in BUGS if bug.silent] == ["11a", "11c", "16a", "35b", "36b", "39b", "43b", "49b"]
    assert [bug.name for bug, _ in BUGS_BESIDE if bug.silent] == ["2, loss_func=mean_squared", "5, as stored", "28, bias by scale"]
    assert Counter(bug.op for bug, _ in BUGS if bug.unseen) == {"log": 44, "div": 3}


@pytest.mark.parametrize("program", [*PROGRAMS, *EXTRAS], ids=lambda program: program.script)
def test_a_healthy_batch_is_healthy(program: Program) -> None:
    """Loss and gradient are finite on it, of the program and of its twin, which agree where the fix is the same arithmetic; it is within the bounds."""
    batch = program.batch()
    assert inside(batch, program)
    assert {name for name, tensor in batch.items() if tensor.is_floating_point() and name != "labels"} == set(program.bounds)
    assert harm(program.loss, batch) == (True, True)
    assert harm(program.mended, batch) == (True, True)
    assert born(program.loss, batch) is None


@by_bug
def test_a_trigger_makes_the_bug_show(bug: Bug, program: Program) -> None:
    """The first value that is not finite is made by the operator of the row, on its line; loss or gradient are ruined, and not those of the twin."""
    batch = bug.trigger(program.batch())
    assert inside(batch, program)
    assert born(program.loss, batch) == (bug.op, bug.line, bug.number)
    loss_is_finite, gradient_is_finite = harm(program.loss, batch)
    assert loss_is_finite == bug.silent
    assert not (loss_is_finite and gradient_is_finite)
    assert harm(program.mended, batch) == (True, True)
    assert born(program.mended, batch) is None


UNSEEN = [(bug, program) for bug, program in EVERY if bug.unseen is not None]


@pytest.mark.parametrize(("bug", "program"), UNSEEN, ids=[bug.name for bug, _ in UNSEEN])
def test_a_batch_that_only_its_gradient_gives_away(bug: Bug, program: Program) -> None:
    """The loss is finite, its gradient is not, and the operator of the row is the one that ruins it."""
    assert bug.unseen is not None
    batch = bug.unseen(program.batch())
    assert inside(batch, program)
    assert harm(program.loss, batch) == (True, False)
    assert born_backward(program.loss, batch) == (bug.op, bug.line, bug.number)
    assert harm(program.mended, batch) == (True, True)


def test_how_many_have_a_finite_loss_and_a_ruined_gradient() -> None:
    """55 of the 79: 8 that never reach the loss, 47 on some batch. The gradient of 54 holds a NaN; that of 28a is infinite."""
    ruined, without_nan = [], []
    for bug, program in BUGS:
        if trigger := bug.unseen or (bug.trigger if bug.silent else None):
            batch = trigger(program.batch())
            ruined.append(bug.name)
            if not any(given is not None and given.isnan().any() for given in gradients(program.loss(**batch), batch)):
                without_nan.append(bug.name)
    assert (len(ruined), without_nan) == (55, ["28a"])


SILENT = [(bug, program) for bug, program in EVERY if bug.silent]


@pytest.mark.parametrize(("bug", "program"), SILENT, ids=[bug.name for bug, _ in SILENT])
def test_a_silent_bug_never_reaches_the_loss(bug: Bug, program: Program) -> None:
    """Around its trigger the loss is finite, whatever becomes of the gradient."""
    generator, ruined = torch.Generator().manual_seed(1), 0
    for _ in range(20):
        batch = {
            name: tensor.detach().mul(1 + 0.1 * torch.rand(tensor.shape, generator=generator)).requires_grad_()
            if tensor.requires_grad
            else tensor
            for name, tensor in bug.trigger(program.batch()).items()
        }
        loss_is_finite, gradient_is_finite = harm(program.loss, batch)
        assert loss_is_finite
        ruined += not gradient_is_finite
    assert ruined
