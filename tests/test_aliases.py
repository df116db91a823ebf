"""Memory that goes by several names, or changes hands: a saved step holds what was there when the loss read it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from test_tape import fresh
from torch import Tensor, nn

import nanscope
from nanscope.capture.entries import Handle
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import unseen
from nanscope.program.numbers import same_bits

STEPS = 5


class Loop:
    """A loop that trains a model and a weight of none, and holds something from step to step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.held = torch.randn(4)
        self.updated: list[Tensor] = [*self.model.parameters(), self.weight]

    def before_update(self) -> None:
        """Gradients are there."""

    def begin(self, step: int) -> None:
        """A step begins."""


class Synced(Loop):
    """A reference that gets the weight's content now and then, as torch makes it without a word to autograd."""

    def begin(self, step: int) -> None:
        if step in (0, 2):
            self.held.data = self.weight.data.clone()


class Named(Loop):
    """The weight by another name, which counts no write to it."""

    def begin(self, step: int) -> None:
        if step == 0:
            self.held = self.weight.data


class Copied(Loop):
    """What the weight was before the update is kept for the next loss."""

    def before_update(self) -> None:
        self.held = self.weight.data.clone()


class Averaged(Loop):
    """An average of the weight, without a word to autograd."""

    def before_update(self) -> None:
        self.held = 0.5 * self.held + 0.5 * self.weight.data


class Viewed(Loop):
    """One name of the weight is kept, and read before each update."""

    def __init__(self) -> None:
        super().__init__()
        self.name = self.weight.data

    def before_update(self) -> None:
        self.held = torch.cat([self.name[:2] * 2, self.name[2:]])


class Shared(Loop):
    """The weight is laid where something else lies."""

    def begin(self, step: int) -> None:
        if step == 0:
            self.weight.data = self.held.data


class Flat(Loop):
    """The optimizer updates one flat piece of memory that the weights lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.cat([self.weight.data, self.held]))
        self.weight.data, self.held = self.flat.data[:4], self.flat.data[4:]
        self.updated = [*self.model.parameters(), self.flat]

    def before_update(self) -> None:
        assert self.weight.grad is not None
        self.flat.grad = torch.cat([self.weight.grad, self.weight.grad])
        self.weight.grad = None


@pytest.mark.parametrize("kind", [Synced, Named, Copied, Averaged, Viewed, Shared, Flat])
def test_a_saved_step_holds_what_the_loss_has_read(kind: type[Loop], tmp_path: Path) -> None:
    """What an optimizer writes is seen under every name of it, and what was copied before stays what it was."""
    loop = kind()
    optimizer = torch.optim.SGD(loop.updated, lr=0.1)
    read: list[list[Tensor]] = []
    with nanscope.watch(loop.model, optimizer, out=tmp_path, save_steps=range(1, STEPS + 1)) as scope:
        for step in range(STEPS):
            loop.begin(step)
            out = loop.model(torch.ones(4) * step)
            read.append([one.detach().clone() for one in (out, loop.weight, loop.held)])
            (out + loop.weight * 2 + loop.held * 3).tanh().sum().backward()
            loop.before_update()
            optimizer.step()
            optimizer.zero_grad()
    saved = sorted(path for path in tmp_path.glob("*/*.safetensors") if path.parent.name != "latest")
    assert len(saved) == STEPS and not scope.bad_steps
    for path, (out, weight, held) in zip(saved, read, strict=True):
        snapshot = nanscope.load(path)
        assert snapshot.program is not None and snapshot.loss is not None
        made = snapshot.program.execute(snapshot.tensors, backward=False).values[snapshot.program.output]
        assert same_bits(made.detach(), snapshot.loss)
        assert same_bits(made.detach(), (out + weight * 2 + held * 3).tanh().sum())


def test_what_overflows_by_what_a_weight_was_before_its_update_is_found(tmp_path: Path) -> None:
    """The copy was made of another name of it, and waited while the optimizer wrote."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model.weight.detach().clone()
    with nanscope.watch(model, optimizer, out=tmp_path) as scope:
        for step in range(8):
            moved = (model.weight - old) * (1e4 if step == 6 else 1.0)
            far = torch.exp(moved.abs())
            (model(torch.ones(4)).pow(2).sum() + far.mean()).backward()
            old = model.weight.data.clone()
            optimizer.step()
            optimizer.zero_grad()
    first = scope.verdict.incidents[0]
    assert first.step == 7 and first.origin.op == "exp" and first.origin.expression == "torch.exp(moved.abs())"


def left_to(size: int, tape: Tape) -> tuple[bool, Tensor, Tensor, list[Tensor]]:
    """Give a tensor other memory, and make others until one lies where it lay. Returns whether one does, a loss that reads it and what that
    is, and the others, which hold their memory."""
    x = fresh(size)
    kept = x.detach() * 2
    assert tape.find(kept) is not None
    address = kept.data_ptr()
    kept.data = torch.zeros(size)
    with unseen():  # as what a loader has made
        made = [torch.full((size,), 5.0)]
        while made[-1].data_ptr() != address and len(made) < 50:
            made.append(torch.full((size,), 5.0))
    return made[-1].data_ptr() == address, (x * made[-1]).sum(), (x.detach() * 5).sum(), [*made, kept]


def test_a_tensor_in_the_memory_that_another_one_has_left_is_not_taken_for_it() -> None:
    """`x.data = y` gives memory back while what was known of x is held."""
    for size in range(1000, 1040):
        tape = Tape()
        with TapeMode(tape):
            left, loss, expected, others = left_to(size, tape)
            value = tape.find(loss)
        assert value is not None and len(others) > 1
        program, tensors = tape.program(value)
        made = program.execute(tensors, backward=False).values[program.output].detach()
        assert same_bits(made, loss.detach()) and same_bits(made, expected)
        if left:
            return
    pytest.skip("torch has used that memory for something else")


def test_there_is_no_handle_on_what_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, and says nothing more when it is gone."""
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(NotImplementedError):
        Handle(torch.ones(2).to_sparse())
    gc.collect()
    assert not said
