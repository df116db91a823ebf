"""The stable forms of functions that numerical libraries provide, put in place of what the code computes step by step.

    log(softmax(z))            log_softmax(z)            log(gather(softmax(z)))       gather(log_softmax(z))
    log(sum(exp(z)))           logsumexp(z)              det(a) / det(b)               exp(slogdet(a) − slogdet(b))
    log(1 − exp(x))            log(−expm1(x))            exp(z) / sum(exp(z))          softmax(z)
                                                         x**a / sum(x**a)              softmax(a · log(x))

All but what is shared out are one question: what is the logarithm of this value, said without the value itself, which overflows,
underflows or is rounded to the end of its range? It is answered from the call that made the value, and from those that made its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from nanscope.program.calls import Arg, Call, Ref
from nanscope.program.flow import dims_of
from nanscope.program.numbers import smallest
from nanscope.program.ops import (
    COPIES,
    DETERMINANTS,
    DIFFERENCES,
    EXPANSIONS,
    EXPONENTS,
    INVERSES,
    LOGARITHMS,
    QUOTIENTS,
    REARRANGINGS,
    SHARED_OUT,
    SHIFTS,
    SIGMOIDS,
    SOFTMAXES,
    SQUEEZES,
    SUMS,
)
from nanscope.replay.patch import Patch, Variant

DEEP = 12  # calls that a value is followed back, or forward to the logarithm that is taken of it


@dataclass
class Writing:
    """Calls that are written in the place of one. said: the functions that are used, for the label."""

    patch: Patch
    call: Call
    fresh: int
    calls: list[Call] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def put(self, op: str, *args: Arg, out: int = 0, kwargs: tuple[tuple[str, Arg], ...] = ()) -> Ref:
        """Write a call down; return its result, of several the one at `out`."""
        outs = tuple(self.fresh + n for n in range(out + 1))
        self.fresh += out + 1
        self.calls.append(Call(f"aten.{op}", args, kwargs, outs, self.call.site, self.call.grad, self.call.module))
        return Ref(outs[out])

    def maker(self, arg: Arg) -> Call | None:
        """Return the call that made an argument."""
        return self.patch.program.maker(arg.id) if isinstance(arg, Ref) else None

    def behind(self, arg: Arg) -> Call | None:
        """Return the call that made an argument, behind those that only carry it."""
        made = self.maker(arg)
        while made is not None and made.name in COPIES | EXPANSIONS | SQUEEZES:
            made = self.maker(made.args[0])
        return made

    def squared(self, made: Call | None) -> Ref | None:
        """Return what a call squares, None if it squares nothing."""
        if made is None or not isinstance(made.args[0], Ref):
            return None
        twice = made.name == "square" or (made.name == "pow" and made.args[1] == 2) or (made.name == "mul" and made.args[0] == made.args[1])
        return made.args[0] if twice else None

    def is_above_zero(self, arg: Arg) -> bool:
        """May the plain logarithm be taken of it? 0 is a fair factor where nobody wants its gradient: a mask."""
        if isinstance(arg, (int, float)):
            return arg > 0
        if not isinstance(arg, Ref) or arg.id not in self.patch.values:
            return False
        content = self.patch.values[arg.id]
        fair = content >= 0 if self.patch.program.maker(arg.id) is None and not self._wants_gradient(arg.id) else content > 0
        return content.dtype is not torch.bool and not content.is_complex() and bool((fair & content.isfinite()).all())

    def _wants_gradient(self, value: int) -> bool:
        leaf = self.patch.program.leaf(value)
        return leaf is not None and leaf.diff

    # -- the logarithm of a value, without the value ---------------------------------------------------------------------------------------

    def logarithm(self, arg: Arg, depth: int = 0) -> Ref | None:
        """Write down the logarithm of a value in another way than from the value; None if there is none."""
        made = self.maker(arg)
        known = _LOGARITHMS.get(made.name) if made is not None and depth < DEEP else None
        if made is None:
            return None
        if known is not None and not (made.kwargs and made.name in SHIFTS | QUOTIENTS):  # scaled, or rounded
            before = len(self.calls), len(self.said)
            if (found := known(self, made, depth)) is not None:
                return found
            del self.calls[before[0] :], self.said[before[1] :]
        if depth < DEEP and made.name in REARRANGINGS:
            inner = self.logarithm(made.args[0], depth + 1)
            return None if inner is None else self.put(made.op.removeprefix("aten."), inner, *made.args[1:], kwargs=made.kwargs)
        return None

    def either(self, left: Arg, right: Arg, depth: int) -> tuple[Ref | float, Ref | float] | None:
        """The logarithms of two factors, of which one has another form, and the other may be taken as it is."""
        found = [self.logarithm(arg, depth + 1) for arg in (left, right)]
        if found == [None, None] or any(one is None and not self.is_above_zero(arg) for one, arg in zip(found, (left, right), strict=True)):
            return None
        both = [one if one is not None else self.plain(arg) for one, arg in zip(found, (left, right), strict=True)]
        return both[0], both[1]

    def plain(self, arg: Arg) -> Ref | float:
        """The logarithm as it is taken."""
        return math.log(arg) if isinstance(arg, (int, float)) else self.put("log.default", arg)

    def added(self, left: Ref | float, right: Ref | float, sign: int = 1) -> Ref:
        """The sum, or the difference, of two logarithms."""
        if isinstance(left, Ref):
            return self.put("add.Tensor" if sign > 0 else "sub.Tensor", left, right)
        assert isinstance(right, Ref)
        return self.put("add.Tensor", self.put("neg.default", right) if sign < 0 else right, left)

    def one_minus(self, arg: Arg) -> Ref | None:
        """log(1 − y), by what y is."""
        made = self.behind(arg)
        if made is None:
            return None
        if made.name in SIGMOIDS:
            return self.say("logsigmoid(−x)", self.put("log_sigmoid_forward.default", self.put("neg.default", made.args[0])))
        if made.name == "exp":
            return self._log1mexp(made.args[0])
        if (root := self.squared(made)) is not None:
            x = self._is("tanh", root)
            return None if x is None else self._log_of_sech(x)
        if made.name == "tanh":
            return self._log1tanh(made.args[0], -1.0)
        if made.name == "erf":
            return self._log_normal(made.args[0], -math.sqrt(2), math.log(2))
        if (factors := self._normal(made)) is not None:
            return self._log_normal(factors[0], -factors[1], 0.0)
        return None

    def one_plus(self, arg: Arg) -> Ref | None:
        """log(1 + y), by what y is."""
        made = self.maker(arg)
        if made is None:
            return None
        if made.name == "exp":
            return self.say("softplus", self.put("softplus.default", made.args[0]))
        if made.name == "tanh":
            return self._log1tanh(made.args[0], 1.0)
        if made.name == "erf":
            return self._log_normal(made.args[0], math.sqrt(2), math.log(2))
        return None

    def say(self, function: str, found: Ref) -> Ref:
        """Note a function for the label."""
        if function not in self.said:
            self.said.append(function)
        return found

    def _is(self, name: str, arg: Arg) -> Arg:
        made = self.maker(arg)
        return made.args[0] if made is not None and made.name == name else None

    def _log1mexp(self, x: Arg) -> Ref | None:
        if not isinstance(x, Ref):
            return None
        tiny = -torch.finfo(self.patch.values[x.id].dtype).eps
        return self.say(f"log(−expm1(x)) with x at most {tiny:.3g}", self._log_of_less(self.put("clamp_max.default", x, tiny)))

    def _log_of_less(self, x: Arg) -> Ref:
        return self.put("log.default", self.put("neg.default", self.put("expm1.default", x)))

    def _log_of_sech(self, x: Arg) -> Ref:
        """log(1 − tanh²(x)) = 2 · (log 2 − x − softplus(−2x))."""
        soft = self.put("softplus.default", self.put("mul.Tensor", x, -2.0))
        total = self.put("add.Tensor", self.put("neg.default", self.put("add.Tensor", x, soft)), math.log(2))
        return self.say("2 · (log 2 − x − softplus(−2x)), of log(1 − tanh²(x))", self.put("mul.Tensor", total, 2.0))

    def _log1tanh(self, x: Arg, sign: float) -> Ref:
        """log(1 ± tanh(x)) = log 2 − softplus(∓2x)."""
        soft = self.put("softplus.default", self.put("mul.Tensor", x, -2.0 * sign))
        return self.say("log 2 − softplus, of log(1 ± tanh(x))", self.put("add.Tensor", self.put("neg.default", soft), math.log(2)))

    def _log_normal(self, x: Arg, scale: float, shift: float) -> Ref:
        """log(1 + erf(x)) = log 2 + log_ndtr(√2 · x)."""
        found = self.put("special_log_ndtr.default", self.put("mul.Tensor", x, scale))
        return self.say("log_ndtr", self.put("add.Tensor", found, shift) if shift else found)

    def _normal(self, made: Call) -> tuple[Arg, float] | None:
        """Is it half of 1 + erf(x), or of erfc(x): the normal distribution? Then x, and by what it is to be scaled."""
        if made.name != "mul" or 0.5 not in made.args:
            return None
        inner = self.maker(next((arg for arg in made.args if isinstance(arg, Ref)), None))
        if inner is None:
            return None
        if inner.name == "erfc":
            return inner.args[0], -math.sqrt(2)
        if inner.name == "add" and 1 in inner.args and (x := self._is("erf", inner.args[0])) is not None:
            return x, math.sqrt(2)
        return None

    # -- its table, by the operator that made the value ------------------------------------------------------------------------------------

    def _of_sigmoid(self, made: Call, depth: int) -> Ref | None:
        return self.say("logsigmoid", self.put("log_sigmoid_forward.default", made.args[0]))

    def _of_softmax(self, made: Call, depth: int) -> Ref | None:
        op = "_log_softmax.default" if made.name == "_softmax" else "log_softmax.int"
        return self.say("log_softmax", self.put(op, *made.args, kwargs=made.kwargs))

    def _of_exp(self, made: Call, depth: int) -> Ref | None:
        (x,) = made.args[:1]
        return self.say("the exponent itself", x) if isinstance(x, Ref) else None

    def _of_expm1(self, made: Call, depth: int) -> Ref | None:
        """log(e^x − 1) = x + log(1 − e^−x)."""
        (x,) = made.args[:1]
        if not isinstance(x, Ref):
            return None
        positive = self.put("clamp_min.default", x, smallest(self.patch.values[x.id].dtype))
        inner = self._log_of_less(self.put("neg.default", positive))
        return self.say("x + log(−expm1(−x))", self.put("add.Tensor", positive, inner))

    def _of_det(self, made: Call, depth: int) -> Ref | None:
        return self.say("slogdet", self.put("_linalg_slogdet.default", made.args[0], out=1))

    def _of_prod(self, made: Call, depth: int) -> Ref | None:
        (x,) = made.args[:1]
        inner = self.logarithm(x, depth + 1)
        if inner is None and not self.is_above_zero(x):
            return None
        logs = inner if inner is not None else self.plain(x)
        assert isinstance(logs, Ref)
        if made.op.endswith(".default"):
            return self.say("the sum of logarithms", self.put("sum.default", logs))
        keep = made.args[2] if len(made.args) > 2 else False
        return self.say("the sum of logarithms", self.put("sum.dim_IntList", logs, (made.args[1],), keep))

    def _of_sum(self, made: Call, depth: int) -> Ref | None:
        inner = self.logarithm(made.args[0], depth + 1)
        if inner is None or not isinstance(made.args[0], Ref):
            return None
        content = self.patch.values[made.args[0].id]
        dims = dims_of(made, content) or tuple(range(content.dim()))
        keep = made.args[2] if len(made.args) > 2 else False
        found = self.say("logsumexp", self.put("logsumexp.default", inner, dims, keep)) if dims else inner
        over = math.prod(content.shape[dim] for dim in dims)
        return self.put("sub.Tensor", found, math.log(over)) if made.name == "mean" and over else found

    def _of_mul(self, made: Call, depth: int) -> Ref | None:
        if (factors := self._normal(made)) is not None:
            return self._log_normal(*factors, 0.0)
        both = self.either(made.args[0], made.args[1], depth)
        return None if both is None else self.added(*both)

    def _of_div(self, made: Call, depth: int) -> Ref | None:
        both = self.either(made.args[0], made.args[1], depth) if not made.kwargs else None
        return None if both is None else self.added(*both, sign=-1)

    def _of_pow(self, made: Call, depth: int) -> Ref | None:
        power = EXPONENTS[made.name]
        exponent = made.args[1] if power is None else power
        inner = self.logarithm(made.args[0], depth + 1) if isinstance(exponent, (int, float)) else None
        return None if inner is None else self.put("mul.Tensor", inner, exponent)

    def _of_add(self, made: Call, depth: int) -> Ref | None:
        number = next((arg for arg in made.args[:2] if isinstance(arg, (int, float))), None)
        other = next((arg for arg in made.args[:2] if isinstance(arg, Ref)), None)
        inner = self.maker(other)
        if number == 1:
            negated = inner is not None and inner.name == "neg"
            return self.one_minus(inner.args[0]) if negated and inner is not None else self.one_plus(other)
        if number == -1 and inner is not None and inner.name == "exp":
            return self._of_expm1(inner, depth)
        return None

    def _of_sub(self, made: Call, depth: int) -> Ref | None:
        left, right = (made.args[1], made.args[0]) if made.name == "rsub" else made.args[:2]
        inner = self.maker(left)
        if left == 1:
            return self.one_minus(right)
        return self._of_expm1(inner, depth) if right == 1 and inner is not None and inner.name == "exp" else None

    def _of_abs(self, made: Call, depth: int) -> Ref | None:
        inner = self.maker(made.args[0])
        return self._of_det(inner, depth) if inner is not None and inner.name in DETERMINANTS else None


_LOGARITHMS: dict[str, Callable[[Writing, Call, int], Ref | None]] = {
    **dict.fromkeys(SIGMOIDS, Writing._of_sigmoid),
    **dict.fromkeys(SOFTMAXES, Writing._of_softmax),
    "exp": Writing._of_exp,
    "expm1": Writing._of_expm1,
    **dict.fromkeys(DETERMINANTS, Writing._of_det),
    "prod": Writing._of_prod,
    **dict.fromkeys(SUMS, Writing._of_sum),
    "mul": Writing._of_mul,
    "div": Writing._of_div,
    **dict.fromkeys(EXPONENTS, Writing._of_pow),
    "add": Writing._of_add,
    **dict.fromkeys(DIFFERENCES, Writing._of_sub),
    "abs": Writing._of_abs,
}


# -- where they are put in -----------------------------------------------------------------------------------------------------------------


def stable(patch: Patch) -> Variant | None:
    """Return the program with the stable form of what the origin is a part of; None if none is known."""
    for place in _places(patch):
        calls, fresh, said = list(patch.program.calls), patch.program.new_id(), ""
        for index in sorted(patch.siblings(place), reverse=True):
            writing = Writing(patch, calls[index], fresh)
            found = _written(writing)
            if found is None:
                continue
            calls[index : index + 1] = [*writing.calls, replace(calls[index], op="aten.alias.default", args=(found,), kwargs=())]
            fresh, said = writing.fresh, ", ".join(writing.said)
        if said:
            site = patch.program.site_of(patch.program.calls[place])
            label = f"{said} in place of {site.expression if site is not None and site.expression else calls[place].name}"
            return Variant("stable_function", label, replace(patch.program, calls=tuple(calls)), patch.tensors)
    return None


def _places(patch: Patch) -> Iterator[int]:
    """Yield the origin's call, if it may have another form, or the first such calls that it goes into."""
    if patch.origin.call is None:
        return
    if patch.op in _FORMS:
        yield patch.origin.call
        return
    values, seen = [patch.origin.value_id], set[int]()
    for _ in range(DEEP):
        readers = {index for value in values for index in patch.program.consumers.get(value, ())} - seen
        seen |= readers
        yield from (index for index in sorted(readers) if patch.program.calls[index].name in _FORMS)
        going = [patch.program.calls[index] for index in sorted(readers) if patch.program.calls[index].name not in _FORMS]
        values = [out for call in going for out in call.outs if out is not None]


def _written(writing: Writing) -> Ref | None:
    """Write down what a call gives in another way."""
    call = writing.call
    return _FORMS[call.name](writing, call) if call.name in _FORMS else None


def _log(writing: Writing, call: Call) -> Ref | None:
    found = writing.logarithm(call.args[0])
    scale = {"log2": 1 / math.log(2), "log10": 1 / math.log(10)}.get(call.name)
    return found if found is None or scale is None else writing.put("mul.Tensor", found, scale)


def _log1p(writing: Writing, call: Call) -> Ref | None:
    inner = writing.maker(call.args[0])
    return writing.one_minus(inner.args[0]) if inner is not None and inner.name == "neg" else writing.one_plus(call.args[0])


def _xlogy(writing: Writing, call: Call) -> Ref | None:
    found = writing.logarithm(call.args[1])
    return None if found is None else writing.put("mul.Tensor", call.args[0], found)


def _quotient(writing: Writing, call: Call) -> Ref | None:
    """softmax, where that is what is divided; else e to the difference of the logarithms."""
    if call.kwargs or len(call.args) < 2:
        return None
    over = writing.behind(call.args[1])
    raised = writing.maker(call.args[0])
    if over is not None and over.name == "sum" and over.args[0] == call.args[0] and raised is not None and raised.name in SHARED_OUT:
        x = raised.args[0]
        content = writing.patch.values[x.id] if isinstance(x, Ref) else None
        dims = dims_of(over, content) or tuple(range(content.dim())) if content is not None else ()
        if len(dims) != 1 or content is None or (raised.name == "pow" and not bool((content >= 0).all())):
            return None
        if raised.name == "pow":  # x to the a, shared out: visits that are sharpened by a temperature
            x = writing.put("mul.Tensor", writing.put("log.default", x), raised.args[1])
        return writing.say("softmax", writing.put("_softmax.default", x, dims[0], False))
    divisor = writing.logarithm(call.args[1])
    both = None if divisor is None else writing.either(call.args[0], call.args[1], 0)
    return None if both is None else writing.put("exp.default", writing.added(*both, sign=-1))


def _inverse(writing: Writing, call: Call) -> Ref | None:
    """What was put in, of a function and its inverse."""
    inner = writing.behind(call.args[0])
    x = inner.args[0] if inner is not None and INVERSES[call.name] == inner.name else None
    return writing.say("what was put into it", x) if isinstance(x, Ref) and len(call.args) == 1 else None


def _norm(writing: Writing, call: Call) -> Ref | None:
    """The norm of what is squared and added up, relative to its largest element, which no square of it can exceed."""
    total = writing.behind(call.args[0])
    squared = writing.maker(total.args[0]) if total is not None and total.name == "sum" else None
    x = writing.squared(squared)
    if total is None or x is None:
        return None
    content = writing.patch.values[x.id]
    dims = dims_of(total, content) or tuple(range(content.dim()))
    keep = len(total.args) > 2 and total.args[2] is True
    most = writing.put("detach.default", writing.put("amax.default", writing.put("abs.default", x), dims, True))
    most = writing.put("clamp_min.default", most, torch.finfo(content.dtype).tiny)
    norm = writing.put("linalg_vector_norm.default", writing.put("div.Tensor", x, most), 2, dims, True)
    found = writing.put("mul.Tensor", norm, most)
    return writing.say("the norm", found if keep or not dims else writing.put("squeeze.dims", found, dims))


_FORMS: dict[str, Callable[[Writing, Call], Ref | None]] = {
    **dict.fromkeys(LOGARITHMS, _log),
    "log1p": _log1p,
    "xlogy": _xlogy,
    "div": _quotient,
    **dict.fromkeys(INVERSES, _inverse),
    "sqrt": _norm,
}
