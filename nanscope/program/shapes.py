"""What shapes the results of a call have, where those of its operands say so at once: to ask torch loads its compiler, seconds of it.

    shapes_of("add", {"self": a, "other": b})            [(3, 4)]
    shapes_of("index", {"self": a, "indices": […]})      None: ask torch

Arguments that do not fit together have shapes, too, which no call will make: torch refuses it when it is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]
Given = Mapping[str, Any]  # arguments by name


def shapes_of(name: str, given: Given) -> list[Shape] | None:
    """Return the shapes of all tensors that an operator makes of such arguments; None where that is not plain."""
    rule = _RULES.get(name)
    try:
        return None if rule is None else rule(given)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def _together(tensors: Iterable[Any]) -> Shape:
    """What operands are broadcast to."""
    sizes = zip_longest(*(reversed(one.shape) for one in tensors if isinstance(one, Tensor)), fillvalue=1)
    return tuple(next((size for size in along if size != 1), 1) for along in sizes)[::-1]


def _all_of(given: Given) -> list[Shape]:
    return [_together(given.values())]


def _put_together(given: Given) -> list[Shape]:
    """A loss of two tensors: of each element, or of all."""
    return _all_of(given) if given.get("reduction", 1) == 0 else [()]


def _picked(given: Given) -> list[Shape]:
    """The loss of a target a row, and the weight of all."""
    return [tuple(given["target"].shape) if given["reduction"] == 0 else (), ()]


def _reduced(given: Given) -> list[Shape]:
    """Along the dimensions that are named, or along all."""
    shape, dims = given["self"].shape, given.get("dim")
    if dims is None or dims == []:
        along = set(range(len(shape)))
    else:
        along = {dim % max(1, len(shape)) for dim in (dims if isinstance(dims, list) else [dims])}
    kept = (1,) if given.get("keepdim") else ()
    return [tuple(part for dim, size in enumerate(shape) for part in (kept if dim in along else (size,)))]


def _asked(given: Given) -> list[Shape]:
    if given.get("dim") == []:
        raise TypeError  # to these it is no dimension
    return _reduced(given)


def _like_self(given: Given) -> list[Shape]:
    return [tuple(given["self"].shape)]


def _like_self_twice(given: Given) -> list[Shape]:
    return _like_self(given) * 2


def _one_number(given: Given) -> list[Shape]:
    return [()]


def _sized(given: Given) -> list[Shape]:
    """As an argument says; −1 stands for what is left."""
    sizes = [int(size) for size in given["size" if "size" in given else "shape"]]
    if -1 in sizes:
        whole, known = given["self"].numel(), math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = whole // known if known else 0
    return [tuple(sizes)]


def _reshaped(given: Given) -> list[Shape]:
    if not given["self"].is_contiguous():
        raise TypeError  # it may be copied first
    return _sized(given)


def _expanded(given: Given) -> list[Shape]:
    own = given["self"].shape
    sizes = [int(size) for size in given["size"]]
    missing = len(sizes) - len(own)
    return [tuple(own[n - missing] if size == -1 else size for n, size in enumerate(sizes))]


def _unsqueezed(given: Given) -> list[Shape]:
    shape, dim = list(given["self"].shape), given["dim"]
    shape.insert(dim % (len(shape) + 1), 1)
    return [tuple(shape)]


def _squeezed(given: Given) -> list[Shape]:
    shape, dims = given["self"].shape, given.get("dim")
    wanted = range(len(shape)) if dims is None else dims if isinstance(dims, list) else [dims]
    gone = {dim % max(1, len(shape)) for dim in wanted}
    return [tuple(size for dim, size in enumerate(shape) if dim not in gone or size != 1)]


def _transposed(given: Given) -> list[Shape]:
    shape = list(given["self"].shape)
    one, other = given["dim0"], given["dim1"]
    shape[one], shape[other] = shape[other], shape[one]
    return [tuple(shape)]


def _turned(given: Given) -> list[Shape]:
    return [tuple(reversed(given["self"].shape))]


def _permuted(given: Given) -> list[Shape]:
    shape = given["self"].shape
    return [tuple(shape[dim] for dim in given["dims"])]


def _selected(given: Given) -> list[Shape]:
    shape = list(given["self"].shape)
    del shape[given["dim"]]
    return [tuple(shape)]


def _sliced(given: Given) -> list[Shape]:
    shape, dim = list(given["self"].shape), given.get("dim", 0)
    shape[dim] = len(range(shape[dim])[slice(given.get("start"), given.get("end"), given.get("step", 1))])
    return [tuple(shape)]


def _like_index(given: Given) -> list[Shape]:
    return [tuple(given["index"].shape)]


def _embedded(given: Given) -> list[Shape]:
    return [(*given["indices"].shape, given["weight"].shape[1])]


def _joined(given: Given) -> list[Shape]:
    tensors, dim = given["tensors"], given.get("dim", 0)
    shape = list(tensors[0].shape)
    if any(tensor.dim() != len(shape) for tensor in tensors):
        raise TypeError  # an empty one is left out, whatever its shape
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return [tuple(shape)]


def _stacked(given: Given) -> list[Shape]:
    shape, dim = list(given["tensors"][0].shape), given.get("dim", 0)
    shape.insert(dim % (len(shape) + 1), len(given["tensors"]))
    return [tuple(shape)]


def _multiplied(first: str, second: str) -> Callable[[Given], list[Shape]]:
    return lambda given: [(*given[first].shape[:-1], given[second].shape[-1])]


def _counted(given: Given) -> list[Shape]:
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    if not all(type(one) is int for one in (start, end, step)):
        raise TypeError
    return [(len(range(start, end, step)),)]


def _of_two_kinds(given: Given) -> list[Shape]:
    """`max` and `min` are of two tensors, of one along a dimension, which they name, too, or of all of it."""
    if "other" in given:
        return _all_of(given)
    return _reduced(given) * (2 if "dim" in given else 1)


_RULES: dict[str, Callable[[Given], list[Shape]]] = {
    name: rule
    for names, rule in (
        (
            """
            abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp
            clamp_max clamp_min cos cosh digamma div elu eq erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod frac ge gelu gt heaviside
            hypot isnan isinf le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or lt maximum minimum
            mish mul nan_to_num ne neg pow reciprocal relu remainder round rsqrt rsub sigmoid sign silu sin sinh softplus sqrt sub tan tanh
            trunc where masked_fill xlogy special_entr""",
            _all_of,
        ),
        ("sum mean amax amin logsumexp argmax argmin var std prod count_nonzero linalg_vector_norm", _reduced),
        ("any all", _asked),
        ("mse_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits", _put_together),
        ("nll_loss_forward", _picked),
        ("log_sigmoid_forward", _like_self_twice),
        ("dot", _one_number),
        ("max min", _of_two_kinds),
        (
            """
            _log_softmax _softmax cumsum cumprod alias clone contiguous detach lift_fresh _to_copy fill zeros_like ones_like full_like
            index_fill scatter scatter_add flip tril triu""",
            _like_self,
        ),
        ("reshape", _reshaped),
        ("as_strided view _unsafe_view zeros ones full new_zeros new_ones new_full", _sized),
        ("expand", _expanded),
        ("unsqueeze", _unsqueezed),
        ("squeeze", _squeezed),
        ("transpose", _transposed),
        ("t", _turned),
        ("permute", _permuted),
        ("select", _selected),
        ("slice", _sliced),
        ("gather", _like_index),
        ("embedding", _embedded),
        ("cat", _joined),
        ("stack", _stacked),
        ("mm", _multiplied("self", "mat2")),
        ("bmm", _multiplied("self", "mat2")),
        ("addmm", _multiplied("mat1", "mat2")),
        ("arange", _counted),
    )
    for name in names.split()
}
