"""Finds the first harmful non-finite value: an exact walk, element by element, from the harm back to where it was born.

Two walks. Forward harm: the loss is non-finite, so go from the loss to whoever made the first bad contributor. Backward harm: the loss
is finite and a gradient is not, so go from the bad gradient towards the loss until the gradient that comes in is still finite; that
call made it, and its forward operands say why.

An infinity that was put there on purpose (an -inf mask) is no origin: the origin is the call that turned it into harm. What softmax,
where or indexing absorb never leads to harm, so the walks never meet it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.locate.drops import Drop, Fate
from nanscope.locate.names import Namer
from nanscope.program.calls import Computes, Leaf, Site, refs
from nanscope.program.flow import Source, sources, spread
from nanscope.program.numbers import at, first_nonfinite, outlier
from nanscope.program.ops import PAYLOAD, SELECTORS, Flow, base_name, flow_of
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.roles import Role
from nanscope.snapshot.observation import Phase
from nanscope.text import unravel

ALIKE = 64  # elements of one result that are looked at to find the first that did harm

SEVERAL = 4  # infinities of one row that are followed: one may be a mask and the next an overflow

DEEP = 10_000  # steps of one walk


_PHASES = {Computes.GRADIENT: Phase.BACKWARD, Computes.UPDATE: Phase.OPTIMIZER, Computes.ACTIVATION: Phase.FORWARD}


@dataclass(frozen=True, slots=True)
class Operand:
    """One element that the origin was computed from. value: the number; index: where it stands in its tensor."""

    id: int
    name: str | None
    role: Role | None
    index: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Origin:
    """The first harmful non-finite value.

    born: made here from finite operands; otherwise fed, it came in with a leaf.
    flat, index, shape: the element. value: what it is. masked: outside the loss, None where nothing selects.
    coefficient: name of an advantage or coefficient that is exactly 0 and multiplies the element.
    """

    value_id: int
    call: int | None
    op: str
    born: bool
    flat: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    value: float
    operands: tuple[Operand, ...]
    variable: str | None
    role: Role | None
    site: Site | None
    leaf: Leaf | None
    masked: bool | None
    drops: tuple[Drop, ...]
    coefficient: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One link of the chain from the origin to the harm. backward: the value is a gradient."""

    value_id: int
    op: str
    variable: str | None
    index: tuple[int, ...]
    value: float
    line: int | None
    backward: bool = False
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a program went wrong: phase, origin, the chain from there to the harm, and which leaf gradients are bad."""

    phase: Phase
    origin: Origin
    chain: tuple[Step, ...]
    bad_gradients: tuple[int, ...]
    also_backward: bool


def locate(program: Program, run: Run) -> Location | None:
    """Return the origin of the harm that a run of `program` shows, None if its output and all gradients are finite.

    run: executed with trace=True.
    """
    return _Walker(program, run).locate()


def spotted(program: Program, run: Run) -> Location | None:
    """Return the first overflow, invalid or divide-by-zero of a forward pass that did no harm, None if there is none.

    Only values that were born from finite operands count: what is infinite on purpose is not worth a word.
    """
    walker = _Walker(program, run)
    for index, call in enumerate(program.calls):
        flow = flow_of(call.op)
        if flow is Flow.MOVE or flow is Flow.CREATE or base_name(call.op) in SELECTORS:
            continue
        for out in call.outs:
            flat = first_nonfinite(run.values[out]) if out is not None else None
            if out is None or flat is None or walker.bad_sources(index, out, flat) or walker.intended(index, out, flat):
                continue
            return Location(Phase.FORWARD, walker.origin(index, out, flat), (), (), False)
    return None


def is_masked(program: Program, run: Run, value: int, flat: int) -> bool | None:
    """Is an element outside the loss? None where nothing selects."""
    return _Walker(program, run).fate.of(value, flat)[0]


def came_in(program: Program, run: Run, value: int, flat: int) -> Location:
    """Return the location of an element that came into the program bad, and did its harm in the backward of what made it."""
    walker = _Walker(program, run)
    return Location(Phase.BACKWARD, walker.origin(None, value, flat), (walker.step(value, flat),), (), True)


JUMP = 1e3  # a call whose result is this much larger than anything it reads makes a spike


def spike(program: Program, run: Run) -> Location | None:
    """Return what made a step huge although everything in it is finite, None if nothing stands out.

    run: executed with trace=True.
    """
    return _Walker(program, run).spike()


_REPORTED = (Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS)


@dataclass(frozen=True, slots=True)
class _Root:
    """Where a backward walk over values ended: born, fed or intended, and the path that led there (harm first)."""

    kind: str
    call: int | None
    value: int
    flat: int
    path: tuple[tuple[int, int], ...]


class _Walker:
    def __init__(self, program: Program, run: Run) -> None:
        self.program = program
        self.run = run
        self.producers = program.producers()
        self.consumers = program.consumers()
        self.names = Namer(program)
        self.fate = Fate(program, run, self.producers, self.consumers, self.names)

    # -- the two walks ---------------------------------------------------------------------------------------------------

    def locate(self) -> Location | None:
        run, program = self.run, self.program
        bad = tuple(
            leaf.id for leaf in program.leaves if leaf.diff and leaf.id in run.grads and first_nonfinite(run.grads[leaf.id]) is not None
        )
        flat = first_nonfinite(run.values[program.output])
        if flat is not None and program.computes is Computes.ACTIVATION:
            flat = _worst(run.values[program.output])
        if flat is not None:
            root = self.walk_back(program.output, flat, 0)
            root = self._flipped(root) or self._first_alike(root)
            origin = self.origin(root.call, root.value, root.flat)
            forward = tuple(self.step(value, position) for value, position in reversed(root.path))
            phase = _PHASES.get(program.computes) or self._phase(origin, Phase.FORWARD)
            return Location(phase, origin, forward, bad, bool(bad))
        if not bad:
            return None
        path, call, value, position = self._walk_gradient(bad[0])
        root = self._why(call, value, position)
        origin = self.origin(root.call, root.value, root.flat, via=value)
        chain = [self.step(v, f) for v, f in reversed(root.path)]
        chain += [self.step(v, f, backward=True) for v, f in reversed(path)]
        return Location(self._phase(origin, Phase.BACKWARD), origin, tuple(chain), bad, True)

    def spike(self) -> Location | None:
        """Follow the largest contribution back to the call that made something large out of what was not, or to where it came in."""
        value, flat = self.program.output, _largest(self.run.values[self.program.output])
        path = [(value, flat)]
        for _ in range(DEEP):
            index = self.producers.get(value)
            if index is None:
                break
            size = abs(at(self.run.values[value], flat))
            call = self.program.calls[index]
            read = []
            for source in sources(call, self.run.values, value, flat):
                content = self.run.values[source.value].flatten()
                if content.is_floating_point() and source.flat.numel():
                    best = int(source.flat[_largest(content[source.flat])])
                    read.append((abs(float(content[best])), source.value, best))
            top = max(read, default=None)
            if top is None:
                break
            if top[0] * JUMP < size:
                origin = self.origin(index, value, flat)
                return Location(Phase.FORWARD, origin, tuple(self.step(v, f) for v, f in reversed(path)), (), False)
            _, value, flat = top
            path.append((value, flat))
        if abs(at(self.run.values[value], flat)) > JUMP:
            origin = self.origin(None, value, flat)
            return Location(self._phase(origin, Phase.INPUT), origin, tuple(self.step(v, f) for v, f in reversed(path)), (), False)
        return self._steepest()

    def _steepest(self) -> Location | None:
        """The call whose backward made its gradient larger by the largest factor."""
        found: tuple[float, int, Tensor] | None = None
        for index, returned in self.run.returned.items():
            received = [self.run.grads[out] for out in self.program.calls[index].outs if out is not None and out in self.run.grads]
            came = max((float(g.abs().max()) for g in received if g.numel()), default=0.0)
            for grad in returned:
                if grad is not None and grad.numel() and came > 0:
                    factor = float(grad.abs().max()) / came
                    if math.isfinite(factor) and (found is None or factor > found[0]):
                        found = (factor, index, grad)
        if found is None or found[0] < JUMP:
            return None
        _, index, grad = found
        out = next(out for out in self.program.calls[index].outs if out is not None)
        same = grad.shape == self.run.values[out].shape
        origin = self.origin(index, out, _largest(grad) if same else 0)
        return Location(Phase.BACKWARD, origin, (self.step(out, origin.flat),), (), True)

    def _phase(self, origin: Origin, otherwise: Phase) -> Phase:
        if origin.born:
            return otherwise
        if origin.leaf is None:
            return Phase.INPUT
        if origin.leaf.made_by == "empty" and any(self.program.calls[index].module for index in self.consumers.get(origin.value_id, ())):
            return Phase.FORWARD
        return {"parameter": Phase.WEIGHTS, "data": Phase.INPUT}.get(origin.leaf.origin, otherwise)

    def walk_back(self, value: int, flat: int, depth: int) -> _Root:
        """Follow a bad element to where it comes from."""
        path = [(value, flat)]
        for _ in range(DEEP):
            index = self.producers.get(value)
            if index is None:
                return self._root_of_leaf(value, flat, path)
            bad = self.bad_sources(index, value, flat)
            if not bad:
                if base_name(self.program.calls[index].op) in ("fill", "full", "masked_fill", "lift_fresh"):
                    return self._root_of_literal(index, value, flat, path)
                kind = "intended" if self.intended(index, value, flat) else "born"
                hidden = self._divided_by(index, value, flat) if kind == "born" else None
                if hidden is not None:
                    value, flat = hidden
                    path.append(hidden)
                    continue
                return _Root(kind, index, value, flat, tuple(path))
            number = at(self.run.values[value], flat)
            nan = [(v, f) for v, f in bad if math.isnan(at(self.run.values[v], f))]
            if math.isnan(number) and not nan:
                # Infinities met here and became NaN. Whose fault: an overflow's, if there is one; on purpose: this call's.
                roots = [self.walk_back(v, f, depth + 1) for v, f in bad[:4]] if depth < 4 else []
                for wanted in ("born", "fed"):
                    if wanted == "fed" and any(root.kind == "intended" for root in roots):
                        break
                    for root in roots:
                        if root.kind == wanted:
                            return _Root(root.kind, root.call, root.value, root.flat, (*path, *root.path))
                return _Root("born", index, value, flat, tuple(path))
            value, flat = (nan or bad)[0]
            path.append((value, flat))
        return _Root("born", self.producers.get(value), value, flat, tuple(path))

    def _first_alike(self, root: _Root) -> _Root:
        """Of several elements that a call made bad, the first one that did harm."""
        if root.kind != "born" or root.call is None:
            return root
        bad = (~torch.isfinite(self.run.values[root.value].flatten())).nonzero().flatten()[:ALIKE].tolist()
        for flat in bad:
            if flat == root.flat:
                break
            if self._made_here(root.call, root.value, flat) and self._goes_on(root, flat) and not self._harmless(root.value, flat):
                return _Root(root.kind, root.call, root.value, flat, (*root.path[:-1], (root.value, flat)))
        return root

    def _made_here(self, call: int, value: int, flat: int) -> bool:
        """Is an element bad although nothing that it was made of is, or a NaN although that is only infinite?"""
        found = [at(self.run.values[v], f) for v, f in self.bad_sources(call, value, flat)]
        return not found or (math.isnan(at(self.run.values[value], flat)) and not any(math.isnan(number) for number in found))

    def _goes_on(self, root: _Root, flat: int) -> bool:
        """Does an element spoil the next value on the way to the harm, or does that absorb it, as softmax does with an −inf?"""
        if len(root.path) < 2:
            return True
        following, _ = root.path[-2]
        index = self.producers.get(following)
        values = self.run.values[root.value]
        mark = torch.zeros(values.numel(), dtype=torch.bool)
        mark[flat] = True
        reached = spread(self.program.calls[index], self.run.values, {root.value: mark.reshape(values.shape)}) if index is not None else {}
        return following not in reached or bool((reached[following] & ~torch.isfinite(self.run.values[following])).any())

    def _harmless(self, value: int, flat: int) -> bool:
        """Is an element taken out on its way to the loss by something that stops infinities, which a mask of zeros does not?"""
        masked, drops, _ = self.fate.of(value, flat)
        return masked is True and bool(drops) and all(drop.how != "mask" for drop in drops)

    def _flipped(self, root: _Root) -> _Root | None:
        """An overflow may come of one weight that is many orders beyond all others: then that weight is where the harm was born."""
        if root.call is None:
            return None
        for leaf in self.program.slice(root.value).leaves:
            if leaf.origin == "parameter":
                flat = outlier(self.run.values[leaf.id])
                if flat is not None:
                    return _Root("fed", None, leaf.id, flat, (*root.path, (leaf.id, flat)))
        return None

    def _divided_by(self, index: int, value: int, flat: int) -> tuple[int, int] | None:
        """A zero that ruins a logarithm or a quotient may be what became of x / inf: then the infinity is where to look."""
        steps = [(index, value, flat)]
        for _ in range(4):
            if not steps:
                return None
            call, out, position = steps.pop()
            for source in sources(self.program.calls[call], self.run.values, out, position):
                tensor = self.run.values[source.value]
                if not tensor.is_floating_point() or source.flat.numel() != 1:
                    continue
                number, made = at(tensor, int(source.flat[0])), self.producers.get(source.value)
                if math.isinf(number) and base_name(self.program.calls[call].op) in ("div", "reciprocal", "pow"):
                    return source.value, int(source.flat[0])
                if number == 0 and made is not None:
                    steps.append((made, source.value, int(source.flat[0])))
        return None

    def bad_sources(self, index: int, out: int, flat: int) -> list[tuple[int, int]]:
        """Return the non-finite elements that an element came from; for softmax and its like its own position first."""
        found: list[tuple[int, int]] = []
        call = self.program.calls[index]
        for source in sources(call, self.run.values, out, flat):
            tensor = self.run.values[source.value]
            if not tensor.is_floating_point():
                continue
            part = tensor.flatten()[source.flat]
            bad = source.flat[~torch.isfinite(part)]
            if base_name(call.op) == "nansum":
                bad = source.flat[torch.isinf(part)]
            if bad.numel() and flow_of(call.op) is Flow.ALONG:
                number = at(self.run.values[out], flat)
                same = bad[bad == flat]
                if not math.isnan(number) and same.numel():
                    bad = same
                elif math.isnan(number):
                    numbers = tensor.flatten()[bad]
                    worst = bad[torch.isnan(numbers)] if bool(torch.isnan(numbers).any()) else bad[numbers == math.inf]
                    bad = worst if worst.numel() else bad
            if bad.numel():
                numbers = tensor.flatten()[bad]
                nan = bad[torch.isnan(numbers)]
                alike = bad[numbers == at(self.run.values[out], flat)]  # of a maximum over +inf and −inf, the one that it is
                if not nan.numel() and alike.numel():
                    bad = alike
                every = nan if nan.numel() else bad
                several = SEVERAL if flow_of(call.op) is Flow.ALONG and not nan.numel() else 1
                found += [(source.value, int(position)) for position in every[:several]]
        return found

    def intended(self, index: int, value: int, flat: int) -> bool:
        """Is an infinity that no operand explains there on purpose: written as a constant, or the logarithm of a mask?"""
        call = self.program.calls[index]
        flow = flow_of(call.op)
        if flow is Flow.MOVE or flow is Flow.CREATE:
            return True
        if base_name(call.op) in ("log", "mul", "div", "_to_copy", "neg", "rsub", "sub", "add"):
            # (1 - mask) * -inf, mask.log(), (~mask).to(float) / 0: arithmetic on masks and constants only
            inputs = [v for v in call.inputs() if self.run.values[v].dim() > 0]
            return bool(inputs) and all(self.fate.is_mask(v, None, strict=True) for v in inputs)
        return False

    def _root_of_literal(self, index: int, value: int, flat: int, path: list[tuple[int, int]]) -> _Root:
        """An infinity that the code writes is meant; a NaN that it writes is bad data, in the tensor that it was written into."""
        if not math.isnan(at(self.run.values[value], flat)):
            return _Root("intended", index, value, flat, tuple(path))
        for depth in range(len(path) - 1, -1, -1):
            inner, position = path[depth]
            if depth == 0 or not self._is_write(path[depth - 1][0]):
                return _Root("fed", None, inner, position, tuple(path[: depth + 1]))
        return _Root("fed", None, value, flat, tuple(path))

    def _root_of_leaf(self, value: int, flat: int, path: list[tuple[int, int]]) -> _Root:
        """A literal that was written into a tensor is not where the data went bad: the tensor is."""
        kind = self._fed(value, flat)
        if self.run.values[value].dim() == 0 and len(path) > 1 and self._is_write(path[-2][0]):
            for depth in range(len(path) - 1, -1, -1):
                inner, position = path[depth]
                if self.run.values[inner].dim() > 0:
                    # the last of the writes that filled the tensor
                    while depth > 0 and self._is_write(path[depth - 1][0]):
                        depth -= 1
                        inner, position = path[depth]
                    if kind == "fed" or self._is_record(inner, path[depth:]):
                        return _Root("fed", None, inner, position, tuple(path[: depth + 1]))
                    break
        return _Root(kind, None, value, flat, tuple(path))

    def _is_record(self, value: int, written: list[tuple[int, int]]) -> bool:
        """Is a single −inf among log-probs that somebody reported? Masks are filled; whoever sets an element notes down what came in."""
        made = {base_name(self.program.calls[index].op) for v, _ in written if (index := self.producers.get(v)) is not None}
        return self.names.role(value) in _REPORTED and "scatter" in made and not made & {"masked_fill", "fill"}

    def _is_write(self, value: int) -> bool:
        index = self.producers.get(value)
        return index is not None and base_name(self.program.calls[index].op) in (
            "as_strided", "expand", "fill", "index_put", "masked_fill", "lift_fresh", "reshape", "scatter",
        )  # fmt: skip

    def _fed(self, value: int, flat: int) -> str:
        number = at(self.run.values[value], flat)
        leaf = self.program.leaf(value)
        if number != -math.inf or leaf is None:
            return "fed"
        if leaf.origin in ("module", "opaque", "cut"):
            return "intended"  # the model masks its own logits
        tensor = self.run.values[value]
        finite = tensor[torch.isfinite(tensor)]
        only_mask = bool((tensor == -math.inf).any()) and (finite.numel() == 0 or bool((finite == 0).all()))
        return "intended" if only_mask or self.names.role(value) is Role.LOGITS else "fed"

    def _walk_gradient(self, leaf: int) -> tuple[list[tuple[int, int]], int, int, int]:
        """From a bad leaf gradient towards the loss; return the path (leaf first), and the call, value and element that made it."""
        value, flat = leaf, first_nonfinite(self.run.grads[leaf]) or 0
        path = [(value, flat)]
        for _ in range(DEEP):
            step = self._contributor(value, flat)
            if step is None:  # finite gradients overflowed when they were added up
                index = self.producers.get(value)
                return path, -1 if index is None else index, value, flat
            call, out, marked = step
            grad = self.run.grads.get(out)
            bad = marked & ~torch.isfinite(grad) if grad is not None else torch.zeros_like(marked)
            if not bool(bad.any()):
                return path, call, out, self._suspicious(call, out, self._all_made(call, out, value, marked))
            value, flat = out, int(bad.flatten().int().argmax())
            path.append((value, flat))
        return path, self.producers.get(value, -1), value, flat

    def _contributor(self, value: int, flat: int) -> tuple[int, int, Tensor] | None:
        """Return the call whose backward gave this element a bad gradient, its result, and the result's elements concerned."""
        tensor = self.run.values[value]
        one = torch.zeros(tensor.numel(), dtype=torch.bool)
        one[flat] = True
        marks = {value: one.reshape(tensor.shape)}
        for index in self.run.order:
            if index not in self.consumers.get(value, ()):
                continue
            call = self.program.calls[index]
            if not any(bool(~torch.isfinite(grad.flatten()[flat])) for grad in self._returned(index, value)):
                continue
            for out, mark in spread(call, self.run.values, marks).items():
                return index, out, mark
        return None

    def _returned(self, index: int, value: int) -> Iterator[Tensor]:
        """Yield the gradients that a call's backward returned for one of its arguments."""
        call = self.program.calls[index]
        returned = self.run.returned[index]
        inputs = [v for arg in call.args for v in refs(arg)] + [v for _, arg in call.kwargs for v in refs(arg)]
        payload = [v for p, arg in enumerate(call.args) if p in PAYLOAD.get(base_name(call.op), (0,)) for v in refs(arg)]
        shape = self.run.values[value].shape
        for names in (inputs, payload):
            if len(names) == len(returned):
                yield from (g for v, g in zip(names, returned, strict=True) if v == value and g is not None and g.shape == shape)
                return
        yield from (g for g in returned if g is not None and g.shape == shape)

    def _all_made(self, call: int, out: int, value: int, marked: Tensor) -> Tensor:
        """Widen the marked elements to all whose backward went bad in the same call, so that the first one is named."""
        grad = self.run.grads.get(out)
        wide = marked.clone()
        for returned in self._returned(call, value):
            if returned.shape == marked.shape:
                wide |= ~torch.isfinite(returned) & (torch.isfinite(grad) if grad is not None else True)
        return wide

    def _suspicious(self, call: int, out: int, marked: Tensor) -> int:
        """Of the elements that a bad gradient went through, the one whose forward value or operands are non-finite."""
        positions = marked.flatten().nonzero().flatten()
        values = self.run.values[out].flatten()
        bad = positions[~torch.isfinite(values[positions])]
        if bad.numel():
            return int(bad[0])
        for position in positions[:256].tolist():
            if self.bad_sources(call, out, position):
                return int(position)
        return int(positions[0])

    def _why(self, call: int, value: int, flat: int) -> _Root:
        """Explain by forward values why a call's backward made a bad gradient out of finite ones."""
        here = _Root("born", None if call < 0 else call, value, flat, ((value, flat),))
        if call < 0:
            return here
        if not math.isfinite(at(self.run.values[value], flat)):
            root = self.walk_back(value, flat, 0)
            return here if root.kind == "intended" else root
        bad = self.bad_sources(call, value, flat)
        if bad:
            root = self.walk_back(*bad[0], 0)
            return here if root.kind == "intended" else _Root(root.kind, root.call, root.value, root.flat, ((value, flat), *root.path))
        return here

    # -- describing ------------------------------------------------------------------------------------------------------

    def step(self, value: int, flat: int, *, backward: bool = False) -> Step:
        index = self.producers.get(value)
        tensor = self.run.grads[value] if backward else self.run.values[value]
        site = self.program.site_of(self.program.calls[index]) if index is not None else None
        op = base_name(self.program.calls[index].op) if index is not None else "input"
        return Step(
            value,
            op,
            self.names.name(value),
            unravel(flat, tensor.shape),
            at(tensor, flat),
            site.line if site else None,
            backward,
            site.file if site else None,
        )

    def origin(self, index: int | None, value: int, flat: int, via: int | None = None) -> Origin:
        """Describe an element as origin. via: the value through whose backward it did harm, where that is another one."""
        tensor = self.run.values[value]
        call = self.program.calls[index] if index is not None else None
        operands = []
        if call is not None:
            for source in sources(call, self.run.values, value, flat):
                operands.append(self._operand(source))
        masked, drops, coefficient = self.fate.of(value, flat) if self.program.computes is Computes.LOSS else (None, (), None)
        mask = self.fate.own_mask(index, value, flat) if self.program.computes is Computes.LOSS else None
        if mask is not None:
            masked, drops = True, (mask, *drops)
        leaf = self.program.leaf(value)
        site = self.program.site_of(call) if call is not None else self._first_reader(value)
        return Origin(
            value_id=value,
            call=index,
            op=base_name(call.op) if call is not None else self._source(leaf),
            born=call is not None,
            flat=flat,
            index=unravel(flat, tensor.shape),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            value=at(tensor, flat),
            operands=tuple(operands),
            variable=self.names.name(value),
            role=self._role(value, leaf, via),
            site=site,
            leaf=leaf,
            masked=masked,
            drops=drops,
            coefficient=coefficient,
        )

    @staticmethod
    def _source(leaf: Leaf | None) -> str:
        """What stands for the op where a value came in."""
        if leaf is None or leaf.origin == "data":
            return "empty" if leaf is not None and leaf.made_by == "empty" else "input"
        return leaf.origin

    def _role(self, value: int, leaf: Leaf | None, via: int | None) -> Role | None:
        if self.program.computes is Computes.UPDATE:
            return Role.OPTIMIZER
        if self.program.computes is Computes.GRADIENT:
            return Role.GRAD
        if leaf is not None and any(self.program.calls[index].module for index in self.consumers.get(value, ())[:1]):
            return Role.WEIGHTS if leaf.origin == "parameter" else Role.HIDDEN  # read inside the model
        return Role.WEIGHTS if leaf is not None and leaf.origin == "parameter" else self.names.role(value, via=via)

    def _operand(self, source: Source) -> Operand:
        tensor = self.run.values[source.value].flatten()
        part = tensor[source.flat]
        if part.numel() == 0:
            flat = 0
        elif part.numel() > 1 and part.is_floating_point():
            flat = int(source.flat[int(torch.nan_to_num(part.float(), nan=math.inf).abs().argmax())])
        else:
            flat = int(source.flat[0])
        shape = self.run.values[source.value].shape
        number = at(tensor, flat) if tensor.numel() else math.nan
        return Operand(source.value, self.names.name(source.value), self.names.role(source.value), unravel(flat, shape), number)

    def _first_reader(self, value: int) -> Site | None:
        for index in self.consumers.get(value, ()):
            site = self.program.site_of(self.program.calls[index])
            if site is not None:
                return site
        return None


def _worst(tensor: Tensor) -> int:
    """The first NaN, else the first +inf, else the first −inf: among values of a model −inf is most often a mask."""
    values = tensor.detach().flatten()
    for bad in (torch.isnan(values), values == math.inf, values == -math.inf):
        if bool(bad.any()):
            return int(bad.int().argmax())
    return 0


def _largest(tensor: Tensor) -> int:
    return int(tensor.detach().flatten().double().abs().argmax())
