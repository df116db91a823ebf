"""Random small losses with a random fault planted in them: what was planted comes back, and what does no harm is not reported.

    d1, d2, mask, p1: tensors; one element of d2 is bad
    y = p1.transpose(0, 1)
    c = torch.tanh(y) * d1 + d2
    v = torch.exp(c)                # planted: +inf at (1, 2)
    y = torch.where(mask, v, 0.5)   # rejects it: the loss is finite, the gradient is not
    loss = y.mean()

Every program is source text that runs as it stands, and every program has a twin that differs in the planted numbers only. What must be
said is known without nanscope: whether there is harm, and in which pass, from running program and twin in plain torch; where, from
where it was planted; whether the loss rejects the element, from moving that element a little in float64 and looking at the loss.
"""

from __future__ import annotations

import itertools
import linecache
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from honest import dishonest
from recorded import record
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.replay.tries import replay
from nanscope.verdict.diagnose import diagnose

RECORDED, WATCHED = 700, 64  # programs under a bare tape, and in a whole training step
ANY: frozenset[bool | None] = frozenset((True, False, None))
Index = tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Numbers that overflow in a dtype. exponent: in exp; factor: when squared; term: when doubled."""

    exponent: float
    factor: float
    term: float


LIMITS = {
    torch.float32: Limits(120.0, 1e25, 2.5e38),
    torch.bfloat16: Limits(120.0, 1e25, 2.5e38),
    torch.float16: Limits(20.0, 1000.0, 50000.0),
    torch.float64: Limits(900.0, 1e200, 1.5e308),
}
DTYPES = [torch.float32] * 5 + [torch.float16] * 2 + [torch.bfloat16, torch.float64] * 2


@dataclass(frozen=True)
class Fault:
    """One op on one element of `c`. target: the number that makes it bad; centre: a number that does not. exact: only that number does.

    {d}, {n}: data that is harmless everywhere, data that is 0 at the element.
    """

    expression: str
    op: str
    target: float | str
    centre: float
    exact: bool = True


FAULTS = [
    Fault("torch.exp(c)", "exp", "exponent", 0.0, exact=False),
    Fault("c.exp()", "exp", "exponent", 0.0, exact=False),
    Fault("torch.expm1(c)", "expm1", "exponent", 0.0, exact=False),
    Fault("torch.exp2(c * 2)", "exp2", "exponent", 0.0, exact=False),
    Fault("torch.sinh(c)", "sinh", "exponent", 0.0, exact=False),
    Fault("torch.cosh(c)", "cosh", "exponent", 0.0, exact=False),
    Fault("{n} / c", "div", 0.0, 1.0),
    Fault("{d} / c", "div", 0.0, 1.0),
    Fault("-{d} / c", "div", 0.0, 1.0),
    Fault("torch.div({d}, c)", "div", 0.0, 1.0),
    Fault("1 / c", "reciprocal", 0.0, 1.0),
    Fault("torch.log(c)", "log", 0.0, 1.0),
    Fault("torch.log(c)", "log", -1.0, 1.0),
    Fault("c.log2()", "log2", 0.0, 1.0),
    Fault("torch.log10(c)", "log10", 0.0, 1.0),
    Fault("torch.log1p(c)", "log1p", -1.0, 0.5),
    Fault("torch.log1p(c)", "log1p", -2.0, 0.5),
    Fault("torch.sqrt(c)", "sqrt", -1.0, 1.0),
    Fault("torch.rsqrt(c)", "rsqrt", 0.0, 1.0),
    Fault("torch.rsqrt(c)", "rsqrt", -1.0, 1.0),
    Fault("c ** 2", "pow", "factor", 1.0, exact=False),
    Fault("torch.square(c)", "pow square", "factor", 1.0, exact=False),
    Fault("c ** 3", "pow", "factor", 1.0, exact=False),
    Fault("c ** 0.5", "pow", -1.0, 1.0),
    Fault("c ** -2", "pow", 0.0, 1.0),
    Fault("c * c", "mul", "factor", 1.0, exact=False),
    Fault("c + c", "add", "term", 1.0, exact=False),
    Fault("torch.addcmul({d}, c, c)", "addcmul", "factor", 1.0, exact=False),
    Fault("torch.asin(c)", "asin", 2.0, 0.0),
    Fault("torch.acosh(c)", "acosh", 0.5, 2.0),
    Fault("torch.atanh(c)", "atanh", 1.0, 0.0),
    Fault("torch.fmod({d}, c)", "fmod", 0.0, 1.0),
    Fault("torch.lgamma(c)", "lgamma", 0.0, 2.0),
    # Finite forward, non-finite backward.
    Fault("torch.sqrt(c)", "sqrt", 0.0, 1.0),
    Fault("c.abs().sqrt()", "sqrt", 0.0, 1.0),
    Fault("c ** 0.5", "pow", 0.0, 1.0),
    Fault("torch.acos(c)", "acos", 1.0, 0.0),
    Fault("torch.asin(c)", "asin", -1.0, 0.0),
    Fault("torch.atan2(c, c * 0)", "atan2", 0.0, 1.0),
    Fault("torch.hypot(c, c * 0)", "hypot", 0.0, 1.0),
]


@dataclass(frozen=True)
class Expected:
    """What must be said of a program. kind: of the value, "nan", "+inf", "-inf" or "finite"; masked: the answers that are not wrong."""

    phase: str
    ops: frozenset[str]
    indices: frozenset[Index]
    kind: str
    masked: frozenset[bool | None]


@dataclass(frozen=True)
class Planted:
    """A program as text, its tensors and those of its healthy twin, which of them want a gradient, and what must be said (None: nothing)."""

    name: str
    source: str
    leaves: dict[str, Tensor]
    twins: dict[str, Tensor]
    diff: frozenset[str]
    expected: Expected | None

    def function(self) -> Callable[..., Tensor]:
        """Return the program as a function, with a source that can be read back."""
        file = f"/planted/{self.name}.py"  # not on disk: linecache has the text
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        space: dict[str, Any] = {"torch": torch, "math": math, "functional": functional}
        exec(compile(self.source, file, "exec"), space)
        made: Callable[..., Tensor] = space["program"]
        return made

    def arguments(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return fresh arguments."""
        return [tensor.clone().requires_grad_(name in self.diff) for name, tensor in tensors.items()]

    def __str__(self) -> str:
        lines = [f"{name} = {tensor.tolist()}  # {tensor.dtype}{', grad' * (name in self.diff)}" for name, tensor in self.leaves.items()]
        return "\n".join([self.name, *lines, self.source, f"expected {self.expected}"])


class Unsuitable(Exception):
    """A program that says nothing: torch cannot run it, or its twin is not healthy."""


def nonfinite(tensor: Tensor) -> list[Index]:
    return [tuple(position) for position in (~torch.isfinite(tensor)).nonzero().tolist()]


def kind_of(value: float) -> str:
    return "nan" if math.isnan(value) else "finite" if math.isfinite(value) else "+inf" if value > 0 else "-inf"


def harm(planted: Planted, tensors: dict[str, Tensor]) -> str | None:
    """Run a program in plain torch: "forward" if its loss is non-finite, "backward" if only a gradient is, None if all is well."""
    arguments = planted.arguments(tensors)
    loss = planted.function()(*arguments)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    if not bool(torch.isfinite(loss)):
        return "forward"
    return "backward" if any(a.grad is not None and nonfinite(a.grad) for a in arguments) else None


# -- writing a program -------------------------------------------------------------------------------------------------------------


@dataclass
class Plant:
    """The planted value. trap: it is finite, and only its gradient is not. leaf: it came in. row: the whole row is bad."""

    variable: str
    ops: frozenset[str]
    index: Index
    trap: bool = False
    leaf: bool = False
    scalar: bool = False
    row: bool = False
    kind: str = ""
    others: list[Index] = field(default_factory=list)


class Writer:
    """Writes a program line by line and runs every line at once, in four ways.

    fault, twin: as they will run. still, moved: in float64 without the fault, and with the planted element moved a little: where these
    two differ, the element is read.
    """

    def __init__(self, seed: str, *, weights: bool = False) -> None:
        self.rng = random.Random(seed)
        self.dtype = self.rng.choice(DTYPES)
        self.weights = weights
        self.lines: list[str] = []
        self.leaves: dict[str, Tensor] = {}
        self.twins: dict[str, Tensor] = {}
        self.diff: set[str] = set()
        self.spaces: dict[str, dict[str, Any]] = {
            name: {"torch": torch, "math": math, "functional": functional} for name in ("fault", "twin", "still", "moved")
        }
        self.plant: Plant | None = None
        self.fate = "read"  # or rejected, zeroed, unclear
        self.met = False  # a mask or a choice let the element pass
        self.start = ""
        self.mask_name = self.rng.choice(["mask", "mask", "keep", "chosen", "loss_mask"])

    # what there is

    @property
    def y(self) -> Tensor:
        found: Tensor = self.spaces["twin"]["y"]
        return found

    def new(self, prefix: str) -> str:
        return next(name for n in itertools.count(1) if (name := f"{prefix}{n}") not in self.leaves)

    def leaf(self, tensor: Tensor, twin: Tensor | None = None, prefix: str = "d", *, diff: bool = False, name: str | None = None) -> str:
        """Add a tensor that comes in from outside; return its name."""
        name = name or self.new("p" if diff else prefix)
        healthy = tensor if twin is None else twin
        self.leaves[name], self.twins[name] = tensor, healthy
        if diff:
            self.diff.add(name)
        wide = healthy.double() if healthy.is_floating_point() else healthy
        for space, content in (("fault", tensor), ("twin", healthy), ("still", wide), ("moved", wide)):
            self.spaces[space][name] = content.clone()
        return name

    def filled(self, shape: Iterable[int], low: float = 0.5, high: float = 1.5) -> Tensor:
        sizes = list(shape)
        values = [self.rng.uniform(low, high) for _ in range(math.prod(sizes))]
        return torch.tensor(values, dtype=torch.float64).reshape(sizes).to(self.dtype)

    def data(self, shape: Iterable[int] | None = None, *, low: float = 0.5, high: float = 1.5) -> str:
        tensor = self.filled(self.y.shape if shape is None else shape, low, high)
        if self.spaces["twin"].get("y") is not None and self.y.is_floating_point():
            tensor = tensor.to(self.y.dtype)
        return self.leaf(tensor, diff=not self.weights and self.rng.random() < 0.15)

    # writing

    def write(self, line: str) -> None:
        self.lines.append(line)
        with torch.no_grad():
            for name, space in self.spaces.items():
                text = line
                if name in ("still", "moved"):
                    for cast in (".float()", ".half()", ".bfloat16()"):
                        text = text.replace(cast, ".double()")
                exec(_compiled(text), space)

    def marks(self, name: str = "y") -> Tensor:
        """Return which elements of a variable depend on the planted one."""
        still, moved = self.spaces["still"][name], self.spaces["moved"][name]
        return torch.ne(still, moved) & ~(torch.isnan(still) & torch.isnan(moved))

    def read(self) -> bool:
        return bool(self.marks("loss" if "loss" in self.spaces["still"] else "y").any())

    def step(self, kind: str, *lines: str, keep: Tensor | None = None) -> None:
        """Write lines and find out what they do with the planted element.

        kind: "plain", "mask" (multiplies), "select" (where, masked_fill, a bool index), "take" (other indexing), "clip", "zero" (a
        coefficient), "unclear". keep: the elements that a mask lets pass.
        """
        if self.plant is None or self.fate != "read":
            for line in lines:
                self.write(line)
            if self.fate == "zeroed" and kind in ("mask", "select", "take", "clip", "unclear"):
                self.fate = "unclear"
            return
        marked, before = self.marks(), self.spaces["fault"]["y"]
        differs = ~torch.isclose(before, self.spaces["twin"]["y"], rtol=1e-6)
        reads = self.read()
        for line in lines:
            self.write(line)
        if not reads:
            self.fate = "unclear"
            return
        if kind == "clip":
            self._clipped(before, marked)
            if bool((differs != marked).any()):
                self.fate = "unclear"
            return
        read = self.read()
        if kind in ("mask", "select"):
            self.met = True
        if not read and (bool((differs != marked).any()) or (keep is not None and bool((marked & keep).any()))):
            self.fate = "unclear"  # more was harmed than moves
        elif not read:
            self.fate = {"mask": "rejected", "select": "rejected", "take": "rejected", "zero": "zeroed"}.get(kind, "unclear")
        elif kind == "unclear":
            self.fate = "unclear"

    def _clipped(self, before: Tensor, marked: Tensor) -> None:
        after = self.spaces["fault"]["y"]
        if self.plant is None or self.plant.trap:
            self.fate = "unclear"
            return
        bad = ~torch.isfinite(before) & marked
        if bool((marked != bad).any()):
            self.fate = "unclear"
        elif bool(torch.isfinite(after[bad]).all()):
            self.fate = "rejected"
        elif bool(torch.isfinite(after[bad]).any()):
            self.fate = "unclear"

    # the planted fault

    def spots(self, indices: list[Index], shape: Iterable[int]) -> Tensor:
        found = torch.zeros(list(shape), dtype=torch.bool)
        for index in indices:
            found[index] = True
        return found

    def set(self, indices: list[Index], target: float, centre: float, *, exact: bool = True) -> None:
        """Write `c`, which is `target` at some elements and near `centre` elsewhere (in the twin: everywhere)."""
        shape, dtype = self.y.shape, self.y.dtype
        spots = self.spots(indices, shape)
        near = f"torch.tanh(y) * 0.25 + {centre}"
        styles = ["scale", "scale", "where", "write", "fill"] + ["minus", "minus"] * (not exact)
        if not self.weights or abs(target) < 1e3:
            styles.append("leaf")
        style = self.rng.choice(styles)
        level = torch.full(shape, centre, dtype=dtype)
        bad = torch.where(spots, torch.tensor(target, dtype=dtype), level)
        if style == "scale":
            quarter = torch.full(shape, 0.25, dtype=dtype)
            scale = self.leaf(quarter.masked_fill(spots, 0.0), quarter)
            self.step("plain", f"c = torch.tanh(y) * {scale} + {self.leaf(bad, level)}")
        elif style == "minus":
            self.step("plain", f"c = torch.tanh(y) * 0.25 - {self.leaf(-bad, -level)}")
        elif style == "where":
            self.step("plain", f"c = torch.where({self.leaf(spots, prefix='f')}, {self.leaf(bad, level)}, {near})")
        elif style == "fill":
            value = self.leaf(torch.tensor(target, dtype=dtype), torch.tensor(centre, dtype=dtype))
            self.step("plain", f"c = ({near}).masked_fill({self.leaf(spots, prefix='f')}, {value})")
        elif style == "write":
            value = self.leaf(torch.tensor(target, dtype=dtype), torch.tensor(centre, dtype=dtype))
            writes = [f"c[{', '.join(map(str, index)) or '...'}] = {value}" for index in indices]
            self.step("plain", f"c = {near}", *writes)
        else:
            wobble = self.filled(shape, -0.2, 0.2).to(dtype) + level
            self.step("plain", f"c = {self.leaf(torch.where(spots, bad, wobble), wobble, diff=True)}")
        if self.rng.random() < 0.06:
            self.step("plain", "c = c.detach()")

    def planted(self, name: str, op: str, index: Index, *, leaf: bool = False) -> Plant:
        """Say that the variable `name` holds the fault, and move the element in the fourth run."""
        fault = self.spaces["fault"][name]
        bad = nonfinite(fault)
        trap = index not in bad
        if trap and bad:
            raise Unsuitable("the fault is elsewhere")
        changed = ~torch.isclose(fault, self.spaces["twin"][name], rtol=1e-6, equal_nan=True)
        if not trap and bool((changed & torch.isfinite(fault)).any()):
            raise Unsuitable("large, but finite")
        self.plant = Plant(
            name, frozenset(op.split()), index, trap, leaf, fault.dim() == 0, len(bad) > 1, kind_of(float(fault[index])), bad
        )
        if trap:
            wide = fault.double()
            self.spaces["still"][name] = wide.clone()
            self.spaces["moved"][name] = wide.clone()
        moved = self.spaces["moved"][name].clone()
        moved[index] += 0.37
        self.spaces["moved"][name] = moved
        return self.plant

    def random_index(self, shape: Iterable[int]) -> Index:
        return tuple(self.rng.randrange(size) for size in shape)

    def plant_pointwise(self) -> None:
        fault = self.rng.choice(FAULTS)
        index = self.random_index(self.y.shape)
        limits = LIMITS[self.y.dtype]
        target = getattr(limits, fault.target) if isinstance(fault.target, str) else fault.target
        expression = fault.expression
        if "{d}" in expression:
            expression = expression.replace("{d}", self.data())
        if "{n}" in expression:
            numerator = self.filled(self.y.shape).to(self.y.dtype)
            numerator[index] = 0
            expression = expression.replace("{n}", self.leaf(numerator))
        self.set([index], target, fault.centre, exact=fault.exact)
        name = self.rng.choice(["v", "v", "ratio", "kl"])
        self.step("plain", f"{name} = {expression}")
        self.planted(name, fault.op, index)
        self.use(name)

    def use(self, name: str) -> None:
        """Go on with the planted value, alone or together with what was there."""
        shape = self.spaces["twin"][name].shape
        forms = ["{v}", "{v}", "{v} * 0.5", "-{v}", "{v} * {d}", "{v} - {d}"]
        if shape == self.y.shape:
            forms += ["{v} * torch.tanh(y)", "{v} + y", "y - {v}"]
        form = self.rng.choice(forms)
        if "{d}" in form:
            form = form.replace("{d}", self.data(shape))
        # `y` of before is not marked: the step below may read it, but it carries nothing
        self.write(f"y = {form.replace('{v}', name)}")

    def plant_reduction(self) -> None:
        """Two elements that overflow together."""
        if self.y.dim() == 0:
            raise Unsuitable
        dim = self.rng.randrange(self.y.dim())
        if self.y.shape[dim] < 2:
            raise Unsuitable
        index = self.random_index(self.y.shape)
        other = list(index)
        other[dim] = self.rng.choice([n for n in range(self.y.shape[dim]) if n != index[dim]])
        limits = LIMITS[self.y.dtype]
        form, op, target = self.rng.choice(
            [
                ("c.sum({})", "sum", limits.term),
                ("torch.sum(c, dim={}, keepdim=True)", "sum", limits.term),
                ("c.prod({})", "prod", limits.factor),
            ]
        )
        self.set([index, tuple(other)], target, 1.0, exact=False)
        self.step("plain", f"v = {form.format(dim)}")
        if "keepdim" in form:
            where = tuple(0 if d == dim else i for d, i in enumerate(index))
        else:
            where = tuple(i for d, i in enumerate(index) if d != dim)
        self.planted("v", op, where)
        self.use("v")

    def plant_matmul(self) -> None:
        """A row and a column that overflow together."""
        if self.y.dim() not in (2, 3):
            raise Unsuitable
        index = self.random_index(self.y.shape)
        factor = LIMITS[self.y.dtype].factor
        columns = self.rng.randint(1, 3)
        column = self.rng.randrange(columns)
        shape = (*self.y.shape[:-2], self.y.shape[-1], columns)
        right = self.filled(shape).to(self.y.dtype)
        right[(*index[:-2], index[-1])] = 0  # the other columns do not read the large factor
        right[(*index[:-2], index[-1], column)] = factor
        self.set([index], factor, 1.0, exact=False)
        name = self.leaf(right)
        if self.y.dim() == 3:
            self.step("plain", f"v = {self.rng.choice(['torch.bmm(c, {})', 'c @ {}']).format(name)}")
            op = "bmm"
        elif self.rng.random() < 0.4:
            bias = self.leaf(self.filled([columns]).to(self.y.dtype))
            self.step("plain", f"v = functional.linear(c, {name}.t(), {bias})")
            op = "addmm linear"
        else:
            self.step("plain", f"v = {self.rng.choice(['torch.mm(c, {})', 'c @ {}', 'torch.matmul(c, {})']).format(name)}")
            op = "mm"
        self.planted("v", op, (*index[:-1], column))
        self.use("v")

    def plant_masked_row(self) -> None:
        """A row in which everything is -inf."""
        if self.y.dim() == 0 or self.y.shape[-1] < 2:
            raise Unsuitable
        flags = torch.zeros(self.y.shape, dtype=torch.bool)
        flags[..., self.rng.randrange(self.y.shape[-1])] = True
        bad = flags.clone()
        row = self.random_index(self.y.shape[:-1])
        bad[row] = True
        form, op = self.rng.choice(
            [
                ("torch.softmax(z, -1)", "_softmax"),
                ("z.log_softmax(-1)", "_log_softmax"),
                ("functional.softmax(z, dim=-1)", "_softmax"),
                ("z - z.amax(-1, keepdim=True)", "sub"),
            ]
        )
        self.step("plain", f"z = y.masked_fill({self.leaf(bad, flags, 'f')}, -math.inf)", f"v = {form}")
        self.planted("v", op, (*row, 0))
        if op != "_softmax":  # the other masked elements are -inf, on purpose
            self.write(f"v = v.masked_fill({self.leaf(flags, prefix='f')}, 0.25)")
        self.use("v")
        self.fate = "unclear"  # a row of them

    def plant_meeting(self) -> None:
        """Infinities that meet: those of an overflow are its fault, those that the code wrote are the fault of the op where they meet."""
        index = self.random_index(self.y.shape)
        form = self.rng.choice(["inf-inf", "0*inf", "const", "plogp", "inf/inf"])
        exponent = LIMITS[self.y.dtype].exponent
        if form == "const":
            spots = self.leaf(self.spots([index], self.y.shape), self.spots([], self.y.shape), "f")
            fill = self.rng.choice(["-math.inf", "math.inf", "float('-inf')"])
            self.step("plain", f"a = y.masked_fill({spots}, {fill})", f"b = torch.tanh(y).masked_fill({spots}, {fill})", "v = a - b")
            self.planted("v", "sub", index)
            self.use("v")
            return
        if form == "plogp":
            if self.y.dim() == 0 or self.y.shape[-1] < 2:
                raise Unsuitable
            spots = self.leaf(self.spots([index], self.y.shape), self.spots([], self.y.shape), "f")
            self.step("plain", f"lp = y.masked_fill({spots}, -math.inf).log_softmax(-1)", "v = lp.exp() * lp")
            self.planted("v", "mul", index)
            self.use("v")
            return
        self.set([index], exponent, 0.0, exact=False)
        if form == "inf-inf":
            self.step("plain", "a = torch.exp(c)", "b = torch.exp(c * 1.5)")
            self.planted("a", "exp", index)
            self.write("y = a - b")
        elif form == "inf/inf":
            self.step("plain", "a = torch.exp(c)")
            self.planted("a", "exp", index)
            self.write("y = a / (1 + a)")
        else:
            coefficient = self.filled(self.y.shape).to(self.y.dtype)
            coefficient[index] = 0
            weight = self.leaf(coefficient, name=self.rng.choice(["advantages", "weight", "d99"]))
            self.step("plain", "y = torch.exp(c)")
            self.planted("y", "exp", index)
            self.step("zero", f"y = y * {weight}")
            if self.y.numel() == 1:
                self.fate = "unclear"  # a single 0 is as well a mask

    def plant_empty(self) -> None:
        """A statistic of nothing, or of one element."""
        form = self.rng.choice(["std", "var", "mean", "masked mean"])
        if form in ("std", "var"):
            if self.y.dim() == 0:
                raise Unsuitable
            dim = self.rng.randrange(self.y.dim())
            width = self.y.shape[dim]
            if width < 2:
                raise Unsuitable
            stop = self.leaf(torch.tensor([0]), torch.tensor(list(range(width))), "i")
            self.step("plain", f"c = y.index_select({dim}, {stop})", f"v = c.{form}({dim})")
            self.planted("v", form, tuple(0 for _ in range(self.y.dim() - 1)))
        elif form == "mean":
            none = self.leaf(torch.zeros(self.y.shape, dtype=torch.bool), torch.ones(self.y.shape, dtype=torch.bool), "f")
            self.step("plain", f"v = y[{none}].mean()")
            self.planted("v", "mean", ())
        else:
            zeros = torch.zeros(self.y.shape, dtype=self.y.dtype)
            none = self.leaf(zeros, zeros + 1, name="weights")
            self.step("plain", f"v = (y * {none}).sum() / {none}.sum()")
            self.planted("v", "div", ())
        self.use("v")
        self.fate = "unclear"

    def plant_leaf(self) -> None:
        """Bad data."""
        shape = () if self.rng.random() < 0.15 else self.y.shape
        index = self.random_index(shape)
        tensor = self.filled(shape).to(self.y.dtype)
        bad = tensor.clone()
        bad[index] = self.rng.choice([math.nan, math.nan, math.inf, -math.inf if tensor.numel() > 1 else math.inf])
        diff = self.rng.random() < (0.5 if self.weights and math.isnan(float(bad[index])) else 0.2)
        if self.weights and not math.isnan(float(bad[index])):
            diff = False
        name = self.leaf(bad, tensor, diff=diff)
        self.planted(name, "input" if not (diff and self.weights) else "parameter", index, leaf=True)
        self.write(
            self.rng.choice(["y = y * {}", "y = y + {}", "y = torch.tanh(y) - {}", "y = y / {}", "y = torch.cos(y) * {}"]).format(name)
        )

    def plant_something(self) -> None:
        (plant,) = self.rng.choices(
            [
                self.plant_pointwise, self.plant_reduction, self.plant_matmul, self.plant_masked_row, self.plant_meeting,
                self.plant_empty, self.plant_leaf,
            ],
            [14, 2, 2, 1.5, 3, 1, 3],
        )  # fmt: skip
        plant()

    # everything else

    def plain(self) -> None:
        """One harmless line."""
        rng, shape, rank = self.rng, self.y.shape, self.y.dim()
        dim = rng.randrange(rank) if rank else 0
        forms: list[str] = [
            "y = torch.tanh(y)", "y = torch.sigmoid(y)", "y = functional.softplus(y)", "y = -y", "y = y.abs()", "y = y * 0.7",
            "y = y + 0.5", "y = 1 - y", "y = functional.silu(y)", "y = functional.gelu(y)", "y = torch.sin(y)", "y = y.clone()",
            "y = functional.leaky_relu(y)", "y = functional.logsigmoid(y)", "y = torch.tanh(y).square()", "y = torch.exp(-y.abs())",
            "y = y * {d}", "y = y + {d}", "y = y - {d}", "y = y / {d}", "y = {d} * y", "y = torch.addcmul({d}, y, {d})",
            "y = torch.lerp({d}, y, 0.3)", "y = functional.mse_loss(y, {d}, reduction='none')",
            "y = functional.smooth_l1_loss(y, {d}, reduction='none')", "y = y.float()", "y = y.add(1.0)",
            "y = y.clone()\ny.add_(1.0)", "y = y.clone()\ny.mul_({d})", "y = y.clone()\ny.neg_()", "b = torch.empty_like(y)\nb.copy_(y)\ny = b",
            "b = torch.zeros_like(y)\nb[...] = y\ny = b", "y = torch.where(y > 0, y, y * 0.1)", "y = y.reshape(-1)", "y = y.flatten()",
            "y = y.unsqueeze(0)", "y = y.unsqueeze(-1)", "y = torch.stack([y, y * 0.5])", "y = torch.stack([{d}, y], -1)",
            "y = torch.special.expit(y)", "y = torch.erf(y)", "y = y.contiguous()", "y = torch.clone(y)",
        ]  # fmt: skip
        if rank:
            forms += [
                f"y = y.flip({dim})", f"y = y.roll(1, {dim})", f"y = torch.cat([y, y], {dim})", f"y = torch.cat([{{d}}, y], {dim})",
                f"y = torch.cat(y.chunk(2, {dim})[::-1], {dim})", f"y = torch.cat([t * 0.5 for t in y.split(1, {dim})], {dim})",
                f"y = torch.stack(y.unbind({dim}), {dim})", f"y = y.unsqueeze({dim}).expand({', '.join(['-1'] * dim + ['2'] + ['-1'] * (rank - dim))})",
                f"y = y.softmax({dim})", f"y = y.log_softmax({dim})", f"y = y.cumsum({dim})", f"y = y.mean({dim})", f"y = y.sum({dim}) * 0.5",
                f"y = y.logsumexp({dim})", f"y = y.mean({dim}, keepdim=True)", f"y = y - y.mean({dim}, keepdim=True)",
                f"y = y - y.detach().amax({dim}, keepdim=True)", f"y = torch.sort(y, {dim}).values", f"y = y.repeat({', '.join(['2'] + ['1'] * (rank - 1))})",
                "y = functional.pad(y, (1, 0))", f"y = y.index_select({dim}, {{perm}})", f"y = y.movedim({dim}, 0)",
                "y = y.clone()\ny[0] = y[0] * 0.5", "y = y.clone()\ny[0].mul_(0.5)", "y = y.clone()\ny[..., 0] += 1.0",
                f"y = torch.linalg.vector_norm(y, dim={dim})", "y = y * y.detach().abs().mean()", f"y = functional.normalize(y, dim={dim})",
            ] * 2  # fmt: skip
        if rank > 1:
            forms += [
                "y = y.transpose(0, 1)", "y = y.transpose(-1, -2)", f"y = y.permute({', '.join(map(str, reversed(range(rank))))})",
                "y = y.transpose(0, 1).contiguous().view(-1)", f"y = y.reshape({shape[0]}, -1)", "y = y.flatten(0, 1)",
                "y = y.transpose(0, -1).reshape(-1)", "y = y @ {w}",
            ] * 3  # fmt: skip
        form = rng.choice(forms)
        if shape.numel() > 120 and any(word in form for word in ("cat", "stack", "expand", "repeat", "pad")):
            form = "y = y * 0.9"
        if "{perm}" in form:
            order = list(range(shape[dim]))
            rng.shuffle(order)
            form = form.replace("{perm}", self.leaf(torch.tensor(order), prefix="i"))
        if "{w}" in form:
            form = form.replace("{w}", self.data((shape[-1], rng.randint(1, 4)), low=-0.5))
        while "{d}" in form:
            form = form.replace("{d}", self.data(), 1)
        # what a maximum or an order leaves behind may be read and change nothing
        self.step("unclear" if "sort" in form or "amax" in form else "plain", *form.split("\n"))

    def aside(self) -> None:
        """Something non-finite that never reaches the loss, or an -inf that is absorbed."""
        forms = [
            "with torch.no_grad():\n    metric = torch.log(-y.abs() - 1).sum()", "metric = (y.detach() * math.inf).sum()",
            "metric = torch.exp(y * 0 + 9999.0)", "with torch.no_grad():\n    metric = (y / 0).mean()", "metric = y.detach() - math.inf",
            "metric = torch.full_like(y, math.nan)\nmetric = metric * y",
        ]  # fmt: skip
        if self.y.dim() and self.y.shape[-1] > 1:
            flags = torch.zeros(self.y.shape, dtype=torch.bool)
            flags[..., self.rng.randrange(self.y.shape[-1])] = True
            name = self.leaf(flags, prefix="f")
            forms += [
                f"y = y.masked_fill({name}, -math.inf)\ny = y.softmax(-1)", f"y = y.masked_fill({name}, -math.inf)\ny = y.logsumexp(-1)",
                f"y = torch.where({name}, torch.tensor(-math.inf), y)\ny = y.softmax(-1)",
                f"y = torch.where({name}, -math.inf, y)\ny = torch.logsumexp(y, -1)",
            ] * 2  # fmt: skip
        form = self.rng.choice(forms)
        if not form.startswith("y"):
            self.step("plain", *([form] if form.startswith("with") else form.split("\n")))
            return
        select, absorb = form.split("\n")
        self.step("select", select)
        self.step("plain", absorb)
        if self.plant is not None:
            self.fate = "unclear"  # of a row with -inf in it, an element may be read and change nothing

    def aimed(self) -> Tensor:
        """Return bools, false at the planted element (or a random one) half the time, and never all false."""
        shape = self.y.shape
        flags = torch.tensor([self.rng.random() < 0.7 for _ in range(shape.numel())]).reshape(shape)
        if self.plant is not None:
            flags[self.marks()] = self.rng.random() < 0.35
        if not bool(flags.any()):
            raise Unsuitable
        return flags

    def name_of_mask(self) -> str | None:
        return None if self.mask_name in self.leaves else self.mask_name

    def choose(self) -> None:
        """A mask, a selection or a clip."""
        rng, rank, shape = self.rng, self.y.dim(), self.y.shape
        form = rng.choice(["mul", "mul", "mul", "where", "where", "fill", "bool", "padding", "take", "take", "clip", "clip"])
        if form == "clip":
            a = self.leaf(torch.where(self.filled(shape) > 1, 1.0, -0.5).to(self.y.dtype), name=self.new("a"))
            line = rng.choice(
                [
                    "y = torch.clamp(y, -0.8, 1.2)", "y = y.clamp(max=1.2)", "y = y.clamp(min=-1.0)", "y = torch.minimum(y, {d})",
                    "y = torch.max(y, {d})", "y = torch.min(y, {d})", f"y = torch.min(y * {a}, torch.clamp(y, 0.8, 1.2) * {a})",
                    f"y = -torch.min(y * {a}, y.clamp(0.8, 1.2) * {a})", "y = y.clamp_max(2.0)", "y = torch.fmin(y, {d})",
                ]
            )  # fmt: skip
            self.step("clip", line.replace("{d}", self.data()) if "{d}" in line else line)
            return
        if rank == 0:
            return
        if form == "take":
            self.take()
            return
        flags = self.aimed()
        if form == "mul":
            dtype = rng.choice([self.y.dtype, self.y.dtype, torch.bool, torch.int64, torch.float32])
            if dtype is torch.float32 and self.y.dtype is torch.float64:
                dtype = torch.float64
            name = self.leaf(flags.to(dtype), prefix="m", name=self.name_of_mask())
            self.step(
                "mask",
                rng.choice(["y = y * {}", "y = {} * y", "y = y.clone()\ny.mul_({})"] if dtype is self.y.dtype else ["y = y * {}"]).format(
                    name
                ),
            )
            return
        if form == "padding":  # true where the loss does not count
            name = self.leaf(~flags, name=rng.choice(["padding_mask", "ignored"]))
            self.step("select", rng.choice(["y = y.masked_fill({}, 0.0)", "y = torch.where({}, 0.25, y)"]).format(name))
            return
        name = self.leaf(flags, prefix="f", name=self.name_of_mask())
        line = {
            "where": rng.choice(
                ["y = torch.where({}, y, 0.5)", "y = torch.where(~{}, torch.zeros_like(y), y)", "y = torch.where({}, y, y.detach() * 0)"]
            ),
            "fill": rng.choice(["y = y.masked_fill(~{}, 0.0)", "y = y.masked_fill({} == 0, 0.5)"]),
            "bool": rng.choice(["y = y[{}]", "y = torch.masked_select(y, {})"]),
        }[form].format(name)
        self.step("unclear" if "detach" in line else "select", line)

    def take(self) -> None:
        rng, rank, shape = self.rng, self.y.dim(), self.y.shape
        dim = rng.randrange(rank)
        size = shape[dim]
        some = self.leaf(torch.tensor([rng.randrange(size) for _ in range(rng.randint(1, 3))]), prefix="i")
        start = rng.randrange(size)
        colons = ":, " * dim
        picks = [rng.randrange(size) for _ in range(shape.numel() // size)]
        gathered = [1 if d == dim else n for d, n in enumerate(shape)]
        where = self.leaf(torch.tensor(picks).reshape(gathered), prefix="i")
        self.step(
            "take",
            rng.choice(
                [
                    f"y = y[{colons}{some}]", f"y = y.index_select({dim}, {some})", f"y = y[{colons}{start}]", f"y = y[{colons}{start}:]",
                    f"y = y[{colons}: {start + 1}]", f"y = y.gather({dim}, {where})", f"y = torch.take_along_dim(y, {where}, {dim})",
                    f"y = y.narrow({dim}, {start}, 1)", "y = y[..., -1]", f"y = y.split(1, {dim})[{start}]", f"y = y.unbind({dim})[{start}]",
                    f"y = y.gather({dim}, {where}).squeeze({dim})",
                ]
            ),
        )  # fmt: skip

    def finish(self) -> None:
        rng, rank = self.rng, self.y.dim()
        forms = [
            "loss = y.sum()",
            "loss = y.mean()",
            "loss = -y.mean()",
            "loss = y.float().mean()",
            "loss = (y * 0.5).sum()",
            "loss = y.square().mean()",
        ]
        kind, keep = "plain", None
        if rank:
            forms += [
                "loss = y.sum(-1).mean()",
                "loss = torch.stack([t.mean() for t in y.unbind(0)]).mean()",
                "loss = y.mean(0).sum()",
                "loss = y.flatten().logsumexp(0)",
            ]
            if rng.random() < 0.35 and self.name_of_mask():
                kind = "mask"
                keep = self.aimed()
                name = self.leaf(keep.to(self.y.dtype), name=self.mask_name)
                forms = [
                    f"loss = (y * {name}).sum() / {name}.sum()",
                    f"loss = ((y * {name}).sum(-1) / {name}.sum(-1).clamp(min=1.0)).mean()",
                    f"loss = -(y * {name}).mean()",
                ]
        self.step(kind, rng.choice(forms), keep=keep)
        if "extra" in self.spaces["twin"]:
            self.write("loss = loss + extra")
        elif rng.random() < 0.2:
            self.write(f"loss = loss + 0.1 * {self.start}.float().mean()")

    def build(self, name: str) -> Planted:
        rng = self.rng
        shapes = [(3,), (5,), (2, 3), (3, 5), (4, 4), (4, 1), (1, 6), (2, 3, 4), (3, 3, 3), (2, 1, 3), (12,), (), (3, 2), (1,)]
        shape = rng.choice(shapes)
        self.spaces["twin"]["y"] = self.filled(shape)
        self.start = self.leaf(self.filled(shape, -1.0, 1.0), diff=True)
        self.write(f"y = {self.start}{rng.choice(['', '', ' * 1.0', '.clone()', ' + 0.1'])}")
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            self.plain()
        if rng.random() < 0.15:
            self.aside()
        extra = bool(self.y.dim()) and rng.random() < 0.2
        if extra:  # a mask of another term
            name = self.leaf(self.aimed().to(self.y.dtype), name=self.mask_name)
            self.step("plain", f"extra = (torch.tanh(y) * {name}).mean()")
            self.mask_name = "inside"
        if rng.random() < 0.96:
            self.plant_something()
        chosen = rng.random() < 0.65
        before, after = rng.choice([0, 0, 0, 1, 1, 2]), rng.choice([0, 0, 0, 1, 1, 2])
        for _ in range(before):
            self.plain()
        if chosen:
            self.choose()
        for _ in range(after):
            self.plain()
        if rng.random() < 0.15:
            self.aside()
        if self.y.numel() == 0:
            raise Unsuitable
        self.finish()
        body = "".join("    " + line.replace("\n", "\n    ") + "\n" for line in self.lines)
        source = f"def program({', '.join(self.leaves)}):\n{body}    return loss\n"
        return self.judged(Planted(name, source, self.leaves, self.twins, frozenset(self.diff), None))

    def judged(self, planted: Planted) -> Planted:
        """Run a program and its twin, and say what must be found."""
        if harm(planted, planted.twins) is not None:
            raise Unsuitable
        if self.weights and not planted.function()(*planted.arguments(planted.leaves)).requires_grad:
            raise Unsuitable
        phase = harm(planted, planted.leaves)
        if phase is None:
            return planted
        if self.plant is None:
            raise AssertionError(f"program and twin are the same, and one is bad: {planted}")
        plant = self.plant
        indices = {plant.index}
        if plant.row and not self.read():  # the first one is rejected, others may not be
            indices.update(plant.others)
        if plant.leaf:
            phase = "weights" if "parameter" in plant.ops else "input"
        masked: frozenset[bool | None]
        if phase == "weights":
            masked = frozenset((None,))  # the loss counts tokens, and a weight is none
        elif self.fate == "rejected":
            masked = frozenset((True,))
        elif self.fate == "unclear":
            masked = ANY
        elif self.fate == "read" and self.met and not plant.scalar:
            masked = frozenset((False,))
        else:
            masked = frozenset((False, None))
        expected = Expected(phase, plant.ops, frozenset(indices), plant.kind, masked)
        return Planted(planted.name, planted.source, planted.leaves, planted.twins, planted.diff, expected)


_CODE: dict[str, CodeType] = {}


def _compiled(text: str) -> CodeType:
    if text not in _CODE:
        _CODE[text] = compile(text, "<line>", "exec")
    return _CODE[text]


def planted_program(seed: int, *, weights: bool = False) -> Planted:
    """Return the program of a seed. weights: what wants a gradient is a parameter of a model."""
    for attempt in range(200):
        name = f"{seed}{'w' * weights}.{attempt}"
        try:
            with torch.random.fork_rng(devices=[]):
                return Writer(name, weights=weights).build(name)
        except (Unsuitable, RuntimeError, IndexError):  # RuntimeError: torch has no such op for this dtype
            continue
    raise AssertionError(f"no program for seed {seed}")


# -- the tests ---------------------------------------------------------------------------------------------------------------------


def complaints(expected: Expected, phase: str, op: str, index: Index, value: float | None, masked: bool | None) -> list[str]:
    """Compare what was said with what must be said."""
    found = []
    if phase != expected.phase:
        found.append(f"phase {phase}")
    if op not in expected.ops:
        found.append(f"op {op}")
    if tuple(index) not in expected.indices:
        found.append(f"index {tuple(index)}")
    if value is not None and kind_of(value) != expected.kind:
        found.append(f"value {value}")
    if masked not in expected.masked:
        found.append(f"masked {masked}")
    return found


def check_recorded(planted: Planted) -> list[str]:
    """Return what nanscope says wrongly of a program that was recorded under a bare tape."""
    location = record(planted.function(), *planted.arguments(planted.leaves)).location
    if planted.expected is None:
        return [] if location is None else [f"found {location.phase} {location.origin.op} {location.origin.index}, and there is no harm"]
    if location is None:
        return ["found nothing"]
    origin = location.origin
    return complaints(planted.expected, str(location.phase), origin.op, origin.index, origin.value, origin.masked)


pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")


@pytest.mark.parametrize("seed", range(RECORDED))
def test_what_was_planted_comes_back(seed: int) -> None:
    """Harm or not, phase, op, element, kind of value, and whether the loss rejects it."""
    planted = planted_program(seed)
    assert check_recorded(planted) == [], str(planted)


class Policy(nn.Module):
    """Parameters, and nothing else: the loss reads them as they are, or as `forward` returns them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self) -> dict[str, Tensor]:
        return {name: parameter * 1.0 for name, parameter in self.named_parameters()}


def check_watched(planted: Planted, out: Path, *, called: bool) -> list[str]:
    """Return what nanscope says wrongly of a whole training step, and of what it saved of it. called: the parameters come from `forward`."""
    model = Policy({name: tensor for name, tensor in planted.leaves.items() if name in planted.diff})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    program = planted.function()
    with nanscope.watch(model, out=out) as scope:
        made = model() if called else dict(model.named_parameters())
        loss = program(**{name: made[name] if name in made else tensor.clone() for name, tensor in planted.leaves.items()})
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    verdict = scope.verdict
    spoilt = {name for name in planted.diff if nonfinite(planted.leaves[name])}
    if planted.expected is None and spoilt:  # the loss does not read it: worth no word, or this one
        return [f"found {i.phase} {i.origin.op}, the weight was bad before" for i in verdict.incidents if i.phase != "weights"]
    if planted.expected is None:
        found = [f"found {i.phase} {i.origin.op} {i.origin.index}, and there is no harm" for i in verdict.incidents]
        return found + [f"note {note.slug}: {note.text}" for note in verdict.notes if note.slug != "nonfinite_absorbed"]
    if len(verdict.incidents) != 1:
        return [f"found {len(verdict.incidents)} incidents"]
    (incident,) = verdict.incidents
    origin = incident.origin
    wrong = complaints(planted.expected, incident.phase, origin.op, origin.index, None, origin.masked) + dishonest(incident)
    if incident.snapshot is None:
        return [*wrong, "nothing was saved"]
    saved = nanscope.load(incident.snapshot)
    again = diagnose(saved, incident.snapshot)
    if repr((again.phase, again.cause, again.origin)) != repr((incident.phase, incident.cause, origin)):
        wrong.append(f"the file says {again.phase} {again.cause} {again.origin}, the run said {incident.phase} {incident.cause} {origin}")
    if not saved.observation.outside:
        replayed = replay(saved, full=False)
        if replayed.reproduces is not True:
            wrong.append(f"reproduces: {replayed.reproduces}")
        if replayed.location is None:
            return [*wrong, "the replay is healthy"]
        found_again = replayed.location.origin
        told = complaints(
            planted.expected, str(replayed.location.phase), found_again.op, found_again.index, found_again.value, found_again.masked
        )
        wrong += [f"replayed: {text}" for text in told]
    return wrong


@pytest.mark.parametrize("seed", range(WATCHED))
def test_a_watched_step_says_the_same_and_so_does_its_file(seed: int, tmp_path: Path) -> None:
    """With a model, backward and an optimizer: the verdict, the loaded snapshot and its replay name what was planted."""
    planted = planted_program(seed, weights=True)
    assert check_watched(planted, tmp_path, called=seed % 2 == 1) == [], str(planted)


def found(name: str, body: str, expected: tuple[str, str, Index, str, bool | None] | None, **leaves: Tensor) -> Planted:
    """Return a program by hand; `p` and `q` are parameters."""
    source = f"def program({', '.join(leaves)}):\n    " + body.replace("; ", "\n    ") + "\n    return loss\n"
    said = None
    if expected is not None:
        phase, op, index, kind, masked = expected
        said = Expected(phase, frozenset((op,)), frozenset((index,)), kind, frozenset((masked,) if masked is not None else (None, False)))
    return Planted(name.replace(" ", "_"), source, leaves, {}, frozenset(leaves) & {"p", "q"}, said)


P, YES, NO = torch.tensor([1.0, 2.0, 200.0]), torch.tensor([True, False, True]), torch.tensor([True, True, False])
ONES = torch.ones(1, 3)

# What the random programs have found, as small as it gets.
FOUND = [
    found("inverted mask", "loss = torch.exp(p).masked_fill(~mask, 0.0).mean()", ("forward", "exp", (2,), "+inf", False), p=P, mask=YES),
    found("padding", "loss = torch.exp(p).masked_fill(padding_mask, 0.0).mean()", ("forward", "exp", (2,), "+inf", False), p=P, padding_mask=~YES),
    found("where not", "v = torch.exp(p); loss = torch.where(~mask, torch.zeros_like(v), v).sum()", ("forward", "exp", (2,), "+inf", False), p=P, mask=YES),
    found("mask after flip", "loss = (torch.exp(p).flip(0) * mask).sum()", ("forward", "exp", (2,), "+inf", False), p=P, mask=NO.float()),
    found("mask of another term", "loss = torch.exp(p).sum() + (p.tanh() * mask).sum()", ("forward", "exp", (2,), "+inf", None), p=P, mask=NO.float()),
    found("another piece of a split", "loss = torch.exp(p).split(1)[0].sum()", ("backward", "exp", (2,), "+inf", True), p=P),
    found("another piece of unbind", "a, b, c = torch.exp(p).unbind(0); loss = a + b", ("backward", "exp", (2,), "+inf", True), p=P),
    found("another chunk", "a, b = torch.exp(p[1:]).chunk(2); loss = a.sum()", ("backward", "exp", (1,), "+inf", True), p=P),
    found("one element written", "v = torch.exp(p) * 1.0; v[0] = 0.0; loss = v.sum()", ("forward", "exp", (2,), "+inf", None), p=P),
    found("row of a transposed clone", "v = torch.exp(p).t().clone(); v[0] *= 0.5; loss = v.sum()", ("forward", "exp", (1, 0), "+inf", None), p=torch.tensor([[1.0, 2.0], [200.0, 1.0]])),
    found("scalar data", "loss = (p * beta).sum()", ("input", "input", (), "nan", None), p=P, beta=torch.tensor(math.nan)),
    found("scalar weight", "loss = (p * q).sum()", ("weights", "parameter", (), "nan", None), p=P, q=torch.tensor(math.nan)),
    found("log of where", "c = torch.where(p < 9, p, 0.0); loss = (torch.log(c) * mask).sum()", ("forward", "log", (2,), "-inf", True), p=P, mask=NO.float()),
    found("square of where", "c = torch.where(p < 9, p, p * 1e30); loss = (c * c * mask).sum()", ("forward", "mul", (2,), "+inf", True), p=P, mask=NO.float()),
    found("overflow beside a mask", "z = -(p * p); loss = z.masked_fill(f, -math.inf).softmax(-1).sum()", ("forward", "mul", (1,), "+inf", None), p=torch.tensor([1.0, 1e30]), f=YES[1:] ^ True),
    found("first of several", "loss = p.std(0).flip(0).sum()", ("forward", "std", (0,), "nan", None), p=ONES),
    found("first of several, a mask", "loss = (p.std(0).flip(0) * mask).sum()", ("forward", "std", (0,), "nan", False), p=ONES, mask=NO.flip(0).float()),
    found("a mask after a statistic", "loss = (p.std(0) * mask).sum()", ("forward", "std", (1,), "nan", False), p=ONES, mask=NO.flip(0).float()),
    found("a weight that no loss reads", "loss = torch.where(mask, p - q, 0.0).sum()", None, p=P, q=torch.tensor([1.0, math.nan, 1.0]), mask=YES),
]  # fmt: skip


@pytest.mark.parametrize("planted", FOUND, ids=[planted.name for planted in FOUND])
def test_what_random_programs_have_found(planted: Planted, tmp_path: Path) -> None:
    """Small programs that were once told wrongly."""
    assert check_watched(planted, tmp_path, called=False) == [], str(planted)
