"""A bad step is as bit-identical as a good one: whatever is looked at a second time, the run does not notice.

Each row trains a small model twice, bare and watched, with one bad step in the middle; whoever trains repairs gradients and weights by
hand and goes on. Compared is all that a run can be told by: weights, buffers and their versions, the optimizer with all that it holds,
every generator, counters and caches of modules, classes and globals, how often hooks and forwards ran, and what was raised.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import Row, pairwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscope

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
BAD = 2  # the step that goes wrong
CALLS = 0
SEEN: list[float] = []
LOOP = torch.Generator()
GLOBAL_RNG = np.random.default_rng(0)
TICKS: Iterator[int] = itertools.count()
GIVEN: Iterator[int] = (n for n in range(100))


class Draws(nn.Module):
    """Draws from Python's, numpy's and torch's generators, from its own, and from one of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_rng, self.python_rng, self.numpy_rng = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() + self.python_rng.random() + self.numpy_rng.random() + GLOBAL_RNG.random()
        noise += float(torch.rand((), generator=self.torch_rng)) + float(torch.rand((), generator=LOOP)) + float(torch.rand(()))
        return x * (1 + noise * 1e-3)


class Counts(nn.Module):
    """Keeps a counter, a buffer that is bound anew, one that is written to, a cache and its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.cache, self.last = 0, {}, torch.zeros(())
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache.setdefault("norms", []).append(float(x.detach().nan_to_num(0, 0, 0).norm()))
        self.ema = self.ema * 0.9 + 0.1
        self.total += x.detach().nan_to_num(0, 0, 0).sum(0)
        self.last = x * self.ema
        return self.last + 1e-3 * self.calls


class Elsewhere(nn.Module):
    """Counts in its class, in globals, in iterators, in a function and in a default argument."""

    calls = 0
    norms: list[float] = []  # noqa: RUF012 - what a copy shares with its original
    turns = itertools.cycle([1, 2, 3])

    def forward(self, x: Tensor, memory: list[int] = []) -> Tensor:  # noqa: B006 - as above
        global CALLS
        CALLS += 1
        SEEN.append(float(x.detach().nan_to_num(0, 0, 0).norm()))
        type(self).calls += 1
        self.norms.append(SEEN[-1])
        counted(x)
        memory.append(CALLS)
        return x * (1 + 1e-3 * (next(TICKS) + next(self.turns) + CALLS + len(memory) + self.calls + counted.times))  # type: ignore[attr-defined]


def counted(x: Tensor) -> None:
    counted.times += 1  # type: ignore[attr-defined]


class Clamps(nn.Linear):
    """Writes to its own weight, and to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x.clone().mul_(0.5))


class Locked(nn.Linear):
    """Counts under a lock."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.lock, self.calls = threading.Lock(), 0

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
            return super().forward(x)


class Streams(nn.Linear):
    """Holds what no copy can be made of."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stream = (n for n in range(100))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * next(self.stream))


class Given(nn.Linear):
    """Reads what nobody can read twice, and what it does not hold itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * next(GIVEN))


def hooked() -> nn.Module:
    """Hooks that count, one that changes the output, and hooks on a gradient."""
    module, seen = nn.Linear(WIDTH, WIDTH), []
    module.seen = seen
    module.register_forward_hook(lambda m, i, o: seen.append("forward"))
    module.register_forward_pre_hook(lambda m, i: seen.append("before"))
    module.register_forward_hook(lambda m, i, o: o * 1.5)
    module.register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    module.weight.register_hook(lambda grad: seen.append("grad"))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    return module


def patched() -> nn.Module:
    """Its forward is a closure over the one that it had, as wrappers of models do it."""
    module = nn.Linear(WIDTH, WIDTH)
    inner, state = module.forward, {"calls": 0}

    def forward(x: Tensor) -> Tensor:
        state["calls"] += 1
        return inner(x) * (1 + 1e-3 * state["calls"])

    module.forward, module.state = forward, state
    return module


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)),
    "draws": Draws,
    "counts": Counts,
    "elsewhere": Elsewhere,
    "clamps": lambda: Clamps(WIDTH, WIDTH),
    "locked": Locked,
    "streams": Streams,
    "given": lambda: Given(WIDTH, WIDTH),
    "hooked": hooked,
    "patched": patched,
    "lazy": lazy,
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old_weight_norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


class Fault(nn.Module):
    """Does no harm until it is told to: an overflow in forward, or an infinite slope in backward."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "forward":
            return torch.exp(x.float() * 1e4).to(x.dtype)
        return x + (x * 0).sqrt() if self.fault == "backward" else x


class Spoils(torch.autograd.Function):
    """A custom function whose backward counts, draws, writes to the gradient that it is given, and may divide by 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: dict[str, int], divisor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.box, ctx.divisor, ctx.times = box, divisor, 0
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        global CALLS
        CALLS += 1
        ctx.times += 1
        ctx.box["backwards"] += ctx.times
        ctx.saved_tensors[0].data.mul_(1.0)
        return grad.mul_(1 + 1e-6 * random.random()) * 0.0 / ctx.divisor if not ctx.divisor else grad, None, None


class Masters(torch.optim.Optimizer):
    """Steps weights of its own in float32 and copies them to the model, with a counter and a generator."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(list(params), {"lr": lr})
        self.model = self.param_groups[0]["params"]
        self.masters = [p.detach().clone() for p in self.model]
        self.steps, self.rng = 0, torch.Generator().manual_seed(4)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.steps += 1
        for p, master in zip(self.model, self.masters, strict=True):
            if p.grad is not None:
                master -= self.param_groups[0]["lr"] * (p.grad + 1e-6 * torch.randn(p.shape, generator=self.rng))
                p.copy_(master)


class Factored(torch.optim.Optimizer):
    """Second moments by row, in place, in `state`; a closure over a history that it keeps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        history: list[float] = []
        self.history, self.note = history, lambda value: history.append(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    row = state.setdefault("row", torch.zeros(p.shape[:1]))
                    row.mul_(0.9).add_(p.grad.flatten(1).square().mean(1) if p.dim() > 1 else p.grad.square(), alpha=0.1)
                    p.sub_(group["lr"] * p.grad / (row.sqrt().view(-1, *[1] * (p.dim() - 1)) + 1e-3))
                    self.note(float(row.nan_to_num(0, 0, 0).sum()))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "masters": functools.partial(Masters, lr=0.01),
    "factored": functools.partial(Factored, lr=0.01),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=2),
}

LOOPS = ("plain", "checkpoint", "reentrant", "compiled", "accumulated", "several", "retained", "double", "closure")
VALUES = {
    "part": tuple(PARTS),
    "loop": LOOPS,
    "fault": ("forward", "loss", "backward", "function", "optimizer", "clip"),
    "optimizer": tuple(OPTIMIZERS),
    "precision": ("float32", "autocast", "scaler"),
}
ROWS = pairwise(VALUES)


def losses(row: Row, model: nn.Module, step: int) -> Iterator[Tensor]:
    """The losses of a step, each to be differentiated before the next is asked for; all at once where several are pending."""
    fault = row["fault"] if step == BAD else ""
    model[2].fault = fault  # type: ignore[index, union-attr]
    inner = model if row["loop"] != "compiled" else torch.compile(model, backend="eager")

    def loss() -> Tensor:
        x = torch.randn(5, WIDTH, generator=LOOP)
        with torch.autocast("cpu", torch.bfloat16) if row["precision"] == "autocast" else nullcontext():
            if row["loop"] in ("checkpoint", "reentrant"):
                out = checkpoint(inner, x.requires_grad_(), use_reentrant=row["loop"] == "reentrant")
            else:
                out = inner(x)
        log_ratio = out.float()
        if row["fault"] == "function":
            log_ratio = Spoils.apply(log_ratio, model.box, 0.0 if fault else 1.0)  # type: ignore[no-untyped-call]
        log_ratio = log_ratio * 0 + 200.0 if fault == "loss" else log_ratio * 0.01
        ratio = torch.exp(log_ratio)
        advantages = torch.linspace(-1, 1, len(ratio))[:, None]
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() * (1e30 if fault == "clip" else 1.0)
        if row["loop"] != "double" or row["fault"] == "function":
            return policy
        slopes = torch.autograd.grad(policy, model[3].weight, create_graph=True)  # type: ignore[index, union-attr]
        return policy + 0.1 * slopes[0].square().sum()

    if row["loop"] == "several":
        yield from [loss(), loss()]
    else:
        for _ in range(2 if row["loop"] == "accumulated" else 1):
            yield loss()


def train(row: Row, around: AbstractContextManager[Any]) -> dict[str, Any]:
    """Five steps of a row; returns all that can be told apart afterwards."""
    global CALLS, GLOBAL_RNG, TICKS, GIVEN
    TICKS, GIVEN, Elsewhere.turns = itertools.count(), (n for n in range(100)), itertools.cycle([1, 2, 3])
    torch._dynamo.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed, LOOP.manual_seed):
        seed(7)
    CALLS, Elsewhere.calls, counted.times, GLOBAL_RNG = 0, 0, 0, np.random.default_rng(0)  # type: ignore[attr-defined]
    SEEN.clear()
    Elsewhere.norms.clear()
    Elsewhere.forward.__defaults__[0].clear()  # type: ignore[index]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), PARTS[row["part"]](), Fault(), nn.Linear(WIDTH, 3))
    model.box = {"backwards": 0}  # type: ignore[assignment]
    model(torch.ones(3, WIDTH))  # what is lazy is made
    optimizer = OPTIMIZERS[row["optimizer"]](model.parameters())
    by_itself = row["loop"] == "closure" or row["optimizer"] == "lbfgs"  # the optimizer asks for the loss
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if row["precision"] == "scaler" and not by_itself else None
    raised = []

    def backwards(step: int) -> Tensor:
        optimizer.zero_grad()
        for loss in losses(row, model, step):
            scaled = loss if scaler is None else scaler.scale(loss)
            for again in range(2 if row["loop"] == "retained" else 1):
                scaled.backward(retain_graph=row["loop"] == "retained" and not again)
        if scaler is not None:
            scaler.unscale_(optimizer)
        elif row["fault"] not in ("clip", "backward"):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0, 0, 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

    with around:
        for step in range(5):
            if row["fault"] == "optimizer":
                optimizer.param_groups[0]["lr"] = float("inf") if step == BAD else 0.01
            try:
                if by_itself:
                    optimizer.step(functools.partial(backwards, step))  # type: ignore[arg-type]
                else:
                    backwards(step)
                    optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
            except (RuntimeError, AssertionError) as error:
                raised.append(f"{type(error).__name__}: {error}")
            with torch.no_grad():
                kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
                for tensor in (*model.parameters(), *kept, *getattr(optimizer, "masters", ())):
                    tensor.nan_to_num_(0.1, 0.1, 0.1)
    modules = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return {
        "weights": dict(model.named_parameters()),
        "grads": [p.grad for p in model.parameters()],
        "buffers": dict(model.named_buffers()),
        "versions": [
            t._version for t in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None))
        ],
        "optimizer": [*optimizer.state.values(), {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}],
        "modules": modules,
        "globals": [CALLS, list(SEEN), Elsewhere.calls, list(Elsewhere.norms), counted.times, Elsewhere.forward.__defaults__],  # type: ignore[attr-defined]
        "iterators": [next(TICKS), next(GIVEN), next(Elsewhere.turns)],
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state(), LOOP, GLOBAL_RNG],
        "scaler": None if scaler is None else scaler.state_dict(),
        "raised": raised,
    }


def bits(thing: Any) -> Any:
    """What two things are told apart by, NaN by NaN."""
    if isinstance(thing, Tensor):
        return (
            str(thing.dtype),
            tuple(thing.shape),
            thing.detach().contiguous().flatten().view(torch.uint8).tolist() if thing.numel() else [],
        )
    if isinstance(thing, torch.Generator):
        return bits(thing.get_state())
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.Generator):
        return str(thing.bit_generator.state)
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, dict):
        return {str(key) if not isinstance(key, Tensor) else "a tensor": bits(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [bits(item) for item in thing]
    return thing if isinstance(thing, (int, float, str, type(None))) else type(thing).__name__


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_a_bad_step_changes_nothing(tmp_path: Path, row: Row) -> None:
    """The watched run is the bare one, bit by bit, and its bad step is found."""
    bare = train(row, nullcontext())
    scope = nanscope.watch(out=tmp_path)
    watched = train(row, scope)
    for name, content in bits(bare).items():
        assert bits(watched[name]) == content, name
    if row["fault"] in ("forward", "loss", "optimizer"):
        assert scope.verdict.incidents
    if row["fault"] == "forward" and row["loop"] != "reentrant":
        incident = scope.verdict.incidents[0]
        only_once = row["part"] in ("streams", "given")
        assert incident.origin.op == ("exp" if not only_once else "module")
        assert ("not_run_again" in {note.slug for note in incident.notes}) == only_once
