"""A model whose parts are computed anew in their backward, by a function of autograd that is given a function, is looked into all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscope
from nanscope.capture.recomputing import run_through
from nanscope.verdict.incident import Incident

BAD = 2  # the token that the faults of the block hit


def _reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


class Partitioned(torch.autograd.Function):
    """As training frameworks have their own: an option between the function and its arguments, several results."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        ctx.run, ctx.seed = run, torch.get_rng_state()
        with torch.no_grad():
            outputs = run(*args)
        ctx.save_for_backward(*args)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.seed)
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        torch.set_rng_state(now)
        both = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad and grad is not None]
        torch.autograd.backward([out for out, _ in both], [grad for _, grad in both])
        return None, None, *(tensor.grad for tensor in inputs)


class Offloaded(torch.autograd.Function):
    """As those do that keep what a layer was given on the host: one tensor is named, the others follow."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        with torch.no_grad():
            output = run(hidden, *args)
        ctx.save_for_backward(hidden.to("cpu"))
        ctx.run, ctx.args = run, args
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(hidden, *ctx.args)
        torch.autograd.backward(output, grad)
        return None, hidden.grad, *(None for _ in ctx.args)


def _partitioned(function: Callable[..., Any], *args: Any) -> Any:
    return Partitioned.apply(lambda *given: (function(*given), given[0].detach().mean()), False, *args)[0]


def _offloaded(function: Callable[..., Any], *args: Any) -> Any:
    return Offloaded.apply(function, *args)


WAYS = {"torch's": _reentrant, "partitioned": _partitioned, "offloaded": _offloaded}


class Block(nn.Module):
    """fault: "" for none, "backward" for a square root of 0, "forward" for an exponential that overflows."""

    fault = ""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, keep: Tensor) -> Tensor:
        z = self.drop(torch.tanh(self.linear(hidden)))
        if self.fault == "backward":
            z = z * keep
        norm = torch.sqrt((z**2).sum(-1, keepdim=True))  # backward
        gate = torch.exp(norm - 1000 * (keep - 1) if self.fault == "forward" else norm)  # forward
        return hidden + z / (1 + gate)


class Model(nn.Module):
    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(11, 8), nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 11)
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        hidden, keep = self.embed(ids), (torch.arange(ids.shape[1]) != BAD)[None, :, None].float()
        for block in self.blocks:
            hidden = self.way(block, hidden, keep)
        return torch.as_tensor(self.head(hidden))


def steps(model: Model, fault: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        for block in model.blocks[1:]:
            block.fault = fault if step == 2 else ""
        ids = torch.randint(0, 11, (3, 5))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(way: str, fault: str, out: Path | None) -> tuple[Model, Incident | None]:
    torch.manual_seed(0)
    model = Model(WAYS[way])
    if out is None:
        steps(model, fault)
        return model, None
    with nanscope.watch(out=out, deep_every=0) as scope:
        steps(model, fault)
    return model, scope.verdict.incidents[0] if scope.verdict.incidents else None


@pytest.mark.parametrize("fault", ["backward", "forward"])
@pytest.mark.parametrize("way", WAYS)
def test_what_goes_bad_in_a_part_that_is_computed_anew_is_found_at_its_line(way: str, fault: str, tmp_path: Path) -> None:
    """The line inside of it, the token, and what mends it; and the weights are those of a run that nobody watches."""
    watched, incident = trained(way, fault, tmp_path)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"  # {fault}"))
    assert incident is not None and incident.origin.line == line and incident.origin.op == ("sqrt" if fault == "backward" else "exp")
    assert incident.origin.index is not None and incident.origin.index[1] == BAD
    assert any(fix.works for fix in incident.fixes) and not [note for note in incident.notes if note.slug != "run_as_written"]
    bare, _ = trained(way, fault, None)
    for one, other in zip(watched.parameters(), bare.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


class Reversed(torch.autograd.Function):
    """It is given a function as well, and its gradient is another one than that of what it runs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: Tensor) -> Any:
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, -grad


def test_only_what_computes_anew_is_run_through() -> None:
    """Whose backward does something else keeps it."""
    x = torch.ones(3, requires_grad=True)
    with run_through():
        y = Reversed.apply(torch.exp, x)
    assert type(y.grad_fn).__name__ == "ReversedBackward"
    y.sum().backward()
    assert torch.equal(x.grad, -torch.ones(3))


def test_the_gradients_are_the_same_and_the_function_is_as_it_was() -> None:
    """Also for what it draws; afterwards it is what it was before."""
    apply, grads = torch.autograd.Function.__dict__["apply"], list[Tensor]()
    for inside in (False, True):
        torch.manual_seed(1)
        x, linear = torch.ones(4, 8, requires_grad=True), nn.Linear(8, 8)
        part = nn.Sequential(linear, nn.Dropout(0.5), nn.Tanh())
        if inside:
            with run_through():
                y = _reentrant(part, x)
                grads += torch.autograd.grad(y.sum(), [x, linear.weight])
        else:
            _reentrant(part, x).sum().backward()
            grads += [tensor.grad for tensor in (x, linear.weight) if tensor.grad is not None]
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])
    assert torch.autograd.Function.__dict__["apply"] is apply


def _partitioned(function: Callable[..., Any], *args: Any) -> Any:
    return Partitioned.apply(function, False, *args)


def _entropy(logits: Tensor, ids: Tensor, trap: bool) -> tuple[Tensor, Tensor]:
    p = torch.softmax(logits, -1)
    log_p = torch.where(p > 0, p.log(), 0.0) if trap else torch.log(p)
    return -(p * log_p).sum(-1), torch.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("bad", [1, 2, 6])
@pytest.mark.parametrize("trap", [False, True])
@pytest.mark.parametrize("again", [_reentrant, _partitioned])
def test_a_loss_that_is_computed_anew_is_looked_into(tmp_path: Path, again: Callable[..., Any], trap: bool, bad: int) -> None:
    """As the entropy over a large vocabulary is: its line is told, whether forward or only backward goes bad, and what mends it is proven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, bad + 1):
            mask = torch.ones(2, 4)
            mask[1, BAD] = 0
            logits = model(torch.arange(8).reshape(2, 4) % 7)
            logits = logits - 200 * ((torch.arange(7) == 3) & (mask == 0).unsqueeze(-1)).float() * (step == bad)
            entropy, log_p = again(lambda logits, ids: _entropy(logits, ids, trap), logits, torch.arange(8).reshape(2, 4) % 7)
            loss = -(log_p * mask).sum() / 7 - 0.01 * (entropy * mask).sum() / 7
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.origin.op, list(incident.origin.index), incident.origin.masked) == ("log", [1, BAD, 3], True), incident.sentence
    assert str(incident.phase) == ("backward" if trap else "forward")
    assert incident.origin.function == "_entropy" and incident.fixes[0].works, incident.fixes
