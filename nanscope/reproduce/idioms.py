"""How a call is written in a script: one row per operator of a loss; what has none is written as `torch.ops.aten.name.overload(…)`.

    idiom(Asked.of(call, {0: Phrase("x")}))         torch.clamp_min(x, min=0.0)

What is written is the very operator, to the bit, with all that it was given. What a person would write into a line of theirs is shorter
(`replay.handwriting`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nanscope.program.calls import Arg, Call, Ref, overload
from nanscope.program.spelling import (
    ATOM,
    CASTS,
    COMPARISON,
    FUNCTIONS,
    INFIX,
    POWER,
    PREFIX,
    PRODUCT,
    SIGN,
    SUM,
    Phrase,
    function_of,
)
from nanscope.torch_inside import schema_of

# The words that an argument may be: all others are refused, whatever a file holds.
WORDS = frozenset(("floor", "trunc", "sum", "prod", "mean", "amax", "amin", "none", "tanh", "fro", "nuc", "left", "right", "L", "U"))
UNSAID = frozenset(("device", "layout", "pin_memory", "memory_format", "non_blocking"))  # of the machine, and not of the loss

# torch.name(x, …)
_FUNCTIONS = """
    acos acosh addcdiv addcmul addmm addmv amax amin aminmax asin asinh atan atan2 atanh baddbmm bincount bucketize cdist ceil
    clamp_max clamp_min copysign cos cosh count_nonzero cummax cummin cumulative_trapezoid deg2rad det diag_embed diff digamma erf erfc
    erfinv exp exp2 expm1 eye floor floor_divide fmax fmin fmod frac full_like gather heaviside hypot index_select isfinite isinf isnan
    isneginf isposinf lerp lgamma linspace log log10 log1p log2 logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or
    logical_xor logit logspace logsumexp masked_select maximum minimum mvlgamma nan_to_num nanmedian nextafter nonzero ones_like
    polygamma prod reciprocal relu round rsqrt searchsorted sgn sigmoid sign signbit sin sinc sinh sqrt square std_mean
    take_along_dim tan tanh trace trapezoid tril triu trunc var_mean xlogy zeros_like
"""

# x.name(…)
_METHODS = """
    abs all any argmax argmin argsort clamp clone contiguous cumprod cumsum detach diagonal expand expand_as flatten flip index_add
    index_copy index_fill masked_fill masked_scatter max mean median min movedim nanmean nansum narrow new_full new_ones new_zeros norm
    permute put repeat repeat_interleave reshape roll scatter scatter_add scatter_reduce sort split squeeze std sum swapaxes
    take tile topk transpose unbind unflatten unfold unsqueeze var view view_as
"""

_MOMENTS = frozenset(("std", "var"))
_SHAPES = frozenset(("view", "_unsafe_view", "reshape", "expand", "permute", "repeat", "tile", "flip"))
_MEANS = ("none", "mean", "sum")  # how a number says that a loss is put together


@dataclass(frozen=True, slots=True)
class Asked:
    """A call to be written. values: how what it reads is written. given: its arguments by name, without those that are as they are by
    default; kwonly: which of them have to be named. single: only the first of its results is used, or it has but one."""

    call: Call
    values: Mapping[int, Phrase]
    given: Mapping[str, Arg]
    kwonly: frozenset[str]
    single: bool = True

    @staticmethod
    def of(call: Call, values: Mapping[int, Phrase], *, single: bool = True) -> Asked:
        """Name the arguments of a call. Raises ProgramError if its operator is not in the whitelist."""
        schema = schema_of(overload(call.op))
        given: dict[str, Arg] = {}
        kwonly: set[str] = set()
        named, gap = dict(call.kwargs), False  # after one that is left out, all are named
        for place, argument in enumerate(schema.arguments):
            if argument.name in UNSAID:
                continue
            if place < len(call.args):
                given[argument.name] = call.args[place]
            elif argument.name in named:
                given[argument.name] = named[argument.name]
            else:
                gap = True
                continue
            if argument.kwarg_only:
                kwonly.add(argument.name)
            if gap:
                kwonly.add(argument.name)
            if argument.has_default_value() and place > 0 and _same(given[argument.name], argument.default_value):
                del given[argument.name]
                gap = True
        return Asked(call, values, given, frozenset(kwonly), single)

    def names(self) -> list[str]:
        """Return the names of what is given, in order."""
        return list(self.given)

    def arg(self, name: str) -> Arg:
        """Return an argument, None where it is as by default."""
        return self.given.get(name)

    def piece(self, arg: Arg) -> Phrase:
        """Return an argument as it is written."""
        return written(arg, self.values)

    def text(self, arg: Arg) -> str:
        """Return an argument as it is written between commas."""
        return self.piece(arg).text

    def rest(self, without: Sequence[str] = ()) -> str:
        """Return what follows, as it is written between the brackets of a call."""
        found, keyword = [], False
        for name in self.names():
            if name in without:
                continue
            arg = self.given[name]
            if name == "dim" and arg is None and "keepdim" not in self.given:
                keyword = True
                continue
            keyword = keyword or name in self.kwonly or isinstance(arg, (bool, torch.dtype)) or name in ("dim", "correction", "min", "max")
            if name == "dim" and isinstance(arg, tuple) and len(arg) == 1:
                arg = arg[0]
            found.append(f"{name}={self.text(arg)}" if keyword else self.text(arg))
        return ", ".join(found)


def _same(given: Arg, default: object) -> bool:
    if isinstance(given, tuple):
        return isinstance(default, (list, tuple)) and list(given) == list(default)
    return type(given) is type(default) and given == default


def idiom(asked: Asked) -> Phrase:
    """Return how a call is written."""
    row = ROWS.get(asked.call.name)
    found = row(asked) if row is not None else None
    return found if found is not None else generic(asked)


def generic(asked: Asked) -> Phrase:
    """Return a call by the name of its operator: always right, and seldom read."""
    call = asked.call
    parts = [asked.text(arg) for arg in call.args]
    known = {argument.name for argument in schema_of(overload(call.op)).arguments} - UNSAID  # nothing else is written
    parts += [f"{name}={asked.text(arg)}" for name, arg in call.kwargs if name in known]
    return Phrase(f"torch.ops.{call.op}({', '.join(parts)})")


def written(arg: Arg, values: Mapping[int, Phrase]) -> Phrase:
    """Return an argument as source. Raises ValueError for a word that no operator takes."""
    if isinstance(arg, Ref):
        return values[arg.id]
    if isinstance(arg, tuple):
        return Phrase(f"[{', '.join(written(item, values).text for item in arg)}]")
    if isinstance(arg, str):
        if arg not in WORDS:
            raise ValueError("an argument is a word that no operator of a loss takes")
        return Phrase(f'"{arg}"')
    if arg is None or isinstance(arg, bool):
        return Phrase(str(arg))
    if isinstance(arg, (int, float)):
        return real(arg)
    return Phrase(str(arg)) if isinstance(arg, torch.dtype) else Phrase("None")


def real(number: float) -> Phrase:
    """Return a number as source."""
    if isinstance(number, int):
        return Phrase(str(number), SIGN if number < 0 else ATOM)
    if math.isnan(number):
        return Phrase("torch.nan")
    if math.isinf(number):
        return Phrase("torch.inf") if number > 0 else Phrase("-torch.inf", SIGN)
    return Phrase(repr(number), SIGN if number < 0 else ATOM)


def _infix(asked: Asked) -> Phrase | None:
    symbol, binds = INFIX[asked.call.name]
    names = asked.names()
    if len(names) == 3 and names[2] == "alpha" and asked.call.name in ("add", "sub"):
        one, other = asked.piece(asked.given[names[0]]), asked.piece(asked.given[names[1]])
        scale = asked.piece(asked.given["alpha"])
        return Phrase(f"{one.inside(SUM)} {symbol} {scale.inside(PRODUCT)} * {other.inside(SIGN)}", SUM)
    if asked.call.name == "div" and len(names) == 3:
        return _function(asked)
    if len(names) != 2:
        return None
    one, other = (asked.piece(asked.given[name]) for name in names)
    if binds == POWER:
        return Phrase(f"{one.inside(ATOM)} ** {other.inside(SIGN)}", POWER)
    tight = one.inside(binds + 1 if binds == COMPARISON else binds)  # Python chains comparisons
    return Phrase(f"{tight} {symbol} {other.inside(binds + 1)}", binds)


def _prefix(asked: Asked) -> Phrase | None:
    (name,) = asked.names()[:1]
    return Phrase(f"{PREFIX[asked.call.name]}{asked.piece(asked.given[name]).inside(SIGN)}", SIGN)


def _function(asked: Asked) -> Phrase:
    return Phrase(f"{function_of(asked.call.name)}({asked.rest()})")


def _method(asked: Asked) -> Phrase | None:
    first = asked.names()[0]
    if not isinstance(asked.given[first], Ref):
        return None
    rest = asked.rest((first,))
    if asked.call.name in _SHAPES and len(asked.names()) == 2 and isinstance(asked.given[asked.names()[1]], tuple):
        rest = rest[1:-1] or rest
    name = "reshape" if asked.call.name in ("_unsafe_view", "view") else asked.call.name  # however its elements lie
    return Phrase(f"{asked.piece(asked.given[first]).inside(ATOM)}.{name}({rest})")


def _elu(asked: Asked) -> Phrase | None:
    if set(asked.names()) - {"self", "alpha"}:
        return None
    return Phrase(f"torch.nn.functional.elu({asked.rest()})")


def _rsub(asked: Asked) -> Phrase | None:
    names = asked.names()
    if len(names) != 2:
        return None
    return Phrase(f"{asked.piece(asked.given[names[1]]).inside(SUM)} - {asked.piece(asked.given[names[0]]).inside(PRODUCT)}", SUM)


def _softmax(asked: Asked) -> Phrase:
    return Phrase(f"{function_of(asked.call.name)}({asked.text(asked.given['self'])}, dim={asked.text(asked.given['dim'])})")


def _cast(asked: Asked) -> Phrase | None:
    names = set(asked.names()) - {"self"}
    dtype, value = asked.arg("dtype"), asked.piece(asked.given["self"])
    if names - {"dtype", "copy"}:
        return None
    if dtype is None:
        return Phrase(f"{value.inside(ATOM)}.clone()")
    if isinstance(dtype, torch.dtype) and dtype in CASTS:
        return Phrase(f"{value.inside(ATOM)}.{CASTS[dtype]}()")
    return Phrase(f"{value.inside(ATOM)}.to({asked.text(dtype)})")


def _same_value(asked: Asked) -> Phrase:
    return asked.piece(asked.given[asked.names()[0]])


def _where(asked: Asked) -> Phrase | None:
    if set(asked.names()) != {"condition", "self", "other"}:
        return None
    return Phrase(f"torch.where({', '.join(asked.text(asked.given[name]) for name in ('condition', 'self', 'other'))})")


def _index(asked: Asked) -> Phrase | None:
    places = asked.arg("indices")
    if not isinstance(places, tuple) or not places:
        return None
    inner = ", ".join(":" if place is None else asked.text(place) for place in places)
    return Phrase(f"{asked.piece(asked.given['self']).inside(ATOM)}[{inner}]")


def _at(asked: Asked, inside: str) -> Phrase | None:
    """`x[:, 3]`: at a dimension that is counted from the first."""
    dim = asked.arg("dim") or 0
    if not isinstance(dim, int) or not -1 <= dim <= 3:
        return None
    before = "..., " if dim < 0 else ":, " * dim
    return Phrase(f"{asked.piece(asked.given['self']).inside(ATOM)}[{before}{inside}]")


def _select(asked: Asked) -> Phrase | None:
    index = asked.given["index"]
    return _at(asked, str(index)) if isinstance(index, int) else None


def _slice(asked: Asked) -> Phrase | None:
    start, end, step = asked.arg("start"), asked.arg("end"), asked.arg("step")
    if any(arg is not None and not isinstance(arg, int) for arg in (start, end, step)):
        return None
    first = "" if start in (None, 0) else str(start)
    last = "" if end is None or (isinstance(end, int) and end >= (1 << 62)) else str(end)
    return _at(asked, f"{first}:{last}" + (f":{step}" if step not in (None, 1) else ""))


def _moment(asked: Asked) -> Phrase | None:
    if not asked.call.op.endswith(".correction"):
        return _method(asked)
    gone = ("self", "correction") if asked.arg("correction") == 1 else ("self",)
    return Phrase(f"{asked.piece(asked.given['self']).inside(ATOM)}.{asked.call.name}({asked.rest(gone)})")


def _extremum(asked: Asked) -> Phrase | None:
    return _function(asked) if asked.call.op.endswith(".other") else _method(asked)


def _reciprocal(asked: Asked) -> Phrase:
    return Phrase(f"1 / {asked.piece(asked.given['self']).inside(SIGN)}", PRODUCT)


def _det(asked: Asked) -> Phrase | None:
    return Phrase(f"torch.linalg.det({asked.rest()})") if asked.single else None


def _log_sigmoid(asked: Asked) -> Phrase | None:
    return Phrase(f"{function_of(asked.call.name)}({asked.text(asked.given['self'])})") if asked.single else None


def _reduction(asked: Asked, name: str, first: Sequence[str], rest: Sequence[str] = ()) -> Phrase | None:
    """A loss that is put together as a number says."""
    how = asked.given.get("reduction", 1)
    if not isinstance(how, int) or not 0 <= how < len(_MEANS):
        return None
    parts = [asked.text(asked.given[one]) for one in first]
    parts += [f"{one}={asked.text(asked.given[one])}" for one in rest if asked.arg(one) is not None]
    parts += [] if how == 1 else [f'reduction="{_MEANS[how]}"']
    return Phrase(f"torch.nn.functional.{name}({', '.join(parts)})")


def _regression(asked: Asked) -> Phrase | None:
    return _reduction(asked, asked.call.name, ("self", "target"), ("beta", "delta"))


def _binary(asked: Asked) -> Phrase | None:
    return _reduction(asked, "binary_cross_entropy_with_logits", ("self", "target"), ("weight", "pos_weight"))


def _nll(asked: Asked) -> Phrase | None:
    return _reduction(asked, "nll_loss", ("self", "target"), ("weight", "ignore_index")) if asked.single else None


def _cross_entropy(asked: Asked) -> Phrase | None:
    return _reduction(asked, "cross_entropy", ("self", "target"), ("weight", "ignore_index", "label_smoothing"))


def _sized_factory(asked: Asked) -> Phrase | None:
    size = asked.given[asked.names()[0]]
    if not isinstance(size, tuple):
        return None
    first = f"({', '.join(map(str, size))}{',' * (len(size) == 1)})"
    rest = asked.rest((asked.names()[0],))
    return Phrase(f"torch.{asked.call.name}({first}{', ' + rest if rest else ''})")


def _scalar(asked: Asked) -> Phrase:
    rest = asked.rest((asked.names()[0],))
    return Phrase(f"torch.tensor({asked.text(asked.given[asked.names()[0]])}{', ' + rest if rest else ''})")


def _embedding(asked: Asked) -> Phrase | None:
    if len(asked.names()) != 2:
        return None
    return Phrase(f"{asked.piece(asked.given['weight']).inside(ATOM)}[{asked.text(asked.given['indices'])}]")


def _transposed(asked: Asked) -> Phrase:
    return Phrase(f"{asked.piece(asked.given['self']).inside(ATOM)}.t()")


def _fill(asked: Asked) -> Phrase | None:
    value = asked.arg("value")
    if isinstance(value, Ref):
        return None
    return Phrase(f"torch.full_like({asked.text(asked.given['self'])}, {asked.text(value if value is not None else 0)})")


def _arange(asked: Asked) -> Phrase:
    return Phrase(f"torch.arange({asked.rest()})")


Row = Callable[[Asked], Phrase | None]

ROWS: dict[str, Row] = {
    **dict.fromkeys(INFIX, _infix),
    **dict.fromkeys(PREFIX, _prefix),
    **dict.fromkeys(_FUNCTIONS.split(), _function),
    **dict.fromkeys(_METHODS.split(), _method),
    **dict.fromkeys(FUNCTIONS, _function),
    **dict.fromkeys(_MOMENTS, _moment),
    **dict.fromkeys(("max", "min"), _extremum),
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("alias", "lift", "lift_fresh"), _same_value),
    **dict.fromkeys(("mse_loss", "huber_loss", "smooth_l1_loss"), _regression),
    **dict.fromkeys(("nll_loss", "nll_loss_forward"), _nll),
    **dict.fromkeys(("full", "ones", "zeros"), _sized_factory),
    **dict.fromkeys(("cat", "stack", "concat", "hstack", "vstack"), _function),
    "_linalg_det": _det,
    "_to_copy": _cast,
    "_unsafe_view": _method,
    "arange": _arange,
    "binary_cross_entropy_with_logits": _binary,
    "cross_entropy_loss": _cross_entropy,
    "elu": _elu,
    "embedding": _embedding,
    "fill": _fill,
    "index": _index,
    "log_sigmoid_forward": _log_sigmoid,
    "reciprocal": _reciprocal,
    "rsub": _rsub,
    "scalar_tensor": _scalar,
    "select": _select,
    "slice": _slice,
    "t": _transposed,
    "where": _where,
}
