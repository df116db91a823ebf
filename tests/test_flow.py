"""Elements: which come from which, held against the truth, which is to change one element and see what moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscope.program.calls import Call, Ref, overload
from nanscope.program.flow import behind, element_flow, origins, sources, spread
from nanscope.program.numbers import at, first_nonfinite
from nanscope.program.ops import FLOW, PAYLOAD, SELECTORS, Flow, base_name, flow_of

Args = tuple[Any, ...]


BY_STRIDES = ("aten.as_strided.default", "aten._reshape_alias.default")


def real(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Distinct numbers in no particular order, of a float64 tensor."""
    size = math.prod(shape)
    return torch.linspace(low, high, size, dtype=torch.float64)[
        torch.randperm(size, generator=torch.Generator().manual_seed(size))
    ].reshape(shape)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0])


X, Y, Z = real(2, 3), real(2, 3, low=0.15, high=0.95), real(2, 3, low=0.2, high=0.7)
ROW, COLUMN, ONE, CUBE, FLAT = real(3, low=0.3), real(2, 1, low=0.4), real(low=0.5), real(2, 3, 2), real(5)
MASK = torch.tensor([[True, False, True], [False, False, True]])
N, M = torch.tensor([[5, 3, 6], [9, 12, 7]]), torch.tensor([[1, 2, 3], [3, 2, 1]])

UNARY = """abs acos alias asin asinh atan atanh ceil clone contiguous cos cosh deg2rad detach digamma elu erf erfc erfinv exp exp2 expm1 floor
    frac gelu hardsigmoid hardswish hardtanh leaky_relu lgamma lift lift_fresh log log10 log1p log2 celu selu softplus softshrink mish
    nan_to_num neg positive reciprocal relu relu6 round rsqrt sgn sigmoid sign silu sin sinc sinh sqrt square tan tanh trunc logit
    special_entr special_expit special_log_ndtr special_erfcx special_i0 _to_copy""".split()
BINARY = """add.Tensor atan2 copysign.Tensor div.Tensor true_divide.Tensor floor_divide fmax fmin fmod.Tensor hypot logaddexp logaddexp2 maximum
    minimum mul.Tensor nextafter pow.Tensor_Tensor remainder.Tensor rsub.Tensor sub.Tensor xlogy.Tensor special_xlogy special_xlog1py""".split()
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")


def full(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def pointwise() -> Iterator[tuple[str, Args]]:
    for name in UNARY:
        yield full(name), (X,)
    yield "aten.exp.default", (ONE,)
    yield "aten.exp.default", (CUBE,)
    yield "aten.acosh.default", (real(2, 3, low=1.5, high=3),)
    for name in BINARY:
        yield full(name), (X, Y)
        yield full(name), (COLUMN, ROW)
    for name in ("add.Tensor", "maximum"):
        for other in (ROW, COLUMN, ONE, X):
            yield full(name), (X, other)
    for name in ("add", "mul", "sub", "div", "fmod", "remainder", "clamp_min", "clamp_max", "rsub"):
        yield f"aten.{name}.{'default' if name.startswith('clamp') else 'Scalar'}", (X, 0.5)
    yield "aten.pow.Tensor_Scalar", (X, 2)
    yield "aten.pow.Scalar", (2, X)
    yield "aten.xlogy.Scalar_Self", (2.0, X)
    yield "aten.clamp.default", (X, 0.3, 0.7)
    yield "aten.clamp.default", (X, None, 0.7)
    yield "aten.clamp.Tensor", (X, ROW, Y)
    yield "aten.clamp_min.Tensor", (X, COLUMN)
    yield "aten.clamp_max.Tensor", (X, ROW)
    yield "aten.heaviside.default", (torch.zeros(2, 3, dtype=torch.float64), ROW)
    yield "aten.lerp.Tensor", (X, ROW, COLUMN)
    yield "aten.lerp.Scalar", (X, Y, 0.3)
    yield "aten.addcmul.default", (X, ROW, COLUMN)
    yield "aten.addcdiv.default", (ROW, X, COLUMN)
    yield "aten.threshold.default", (X, 0.4, 3.0)
    yield "aten.polygamma.default", (1, X)
    yield "aten.mvlgamma.default", (real(2, 3, low=2, high=3), 2)
    yield "aten.to.dtype", (X, torch.float32)
    yield "aten.log_sigmoid_forward.default", (X,)
    yield "aten.binary_cross_entropy_with_logits.default", (X, Y, None, None, 0)
    yield "aten.binary_cross_entropy_with_logits.default", (X, Y, None, None, 1)
    for name in LOSSES:
        for reduction in (0, 1, 2):
            yield full(name), (X, Y, reduction)
        yield full(name), (X, Y)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"):
        yield f"aten.{name}.Tensor", (N, M)


def moves() -> Iterator[tuple[str, Args]]:
    yield "aten.view.default", (X, (3, 2))
    yield "aten.view.default", (X, (-1,))
    yield "aten.view.default", (ONE, (1, 1))
    yield "aten._unsafe_view.default", (X, (6,))
    yield "aten._reshape_alias.default", (X, (3, 2), (2, 1))
    yield "aten.reshape.default", (X, (3, 2))
    yield "aten.view_as.default", (X, real(3, 2))
    yield "aten.flatten.using_ints", (CUBE, 1, -1)
    yield "aten.unflatten.int", (CUBE, 1, (3, 1))
    yield "aten.unsqueeze.default", (X, -1)
    yield "aten.squeeze.dim", (COLUMN, -1)
    yield "aten.squeeze.default", (COLUMN,)
    yield "aten.squeeze.dims", (CUBE, (0, 1))
    yield "aten.t.default", (X,)
    yield "aten.transpose.int", (CUBE, 0, -1)
    yield "aten.swapaxes.default", (CUBE, 0, 1)
    yield "aten.permute.default", (CUBE, (2, 0, 1))
    yield "aten.movedim.int", (CUBE, 0, -1)
    yield "aten.expand.default", (COLUMN, (4, 2, 3))
    yield "aten.expand_as.default", (ROW, X)
    yield "aten.broadcast_to.default", (ROW, (2, 3))
    yield "aten.repeat.default", (X, (2, 1, 2))
    yield "aten.tile.default", (X, (2, 2))
    yield "aten.repeat_interleave.self_int", (X, 2, 1)
    yield "aten.repeat_interleave.self_int", (X, 2)
    yield "aten.repeat_interleave.self_Tensor", (X, ints(2, 0, 1), 1)
    yield "aten.flip.default", (X, (0, -1))
    yield "aten.roll.default", (X, (1,), (-1,))
    yield "aten.roll.default", (X, (2,))
    yield "aten.rot90.default", (X, 1, (0, 1))
    yield "aten.slice.Tensor", (X, -1, 0, 3, 2)
    yield "aten.slice.Tensor", (X, 0, -1)
    yield "aten.narrow.default", (X, 1, 1, 2)
    yield "aten.select.int", (X, -1, -2)
    yield "aten.select.int", (ROW, 0, 1)
    yield "aten.diagonal.default", (X, 1)
    yield "aten.diag_embed.default", (X,)
    yield "aten.diag_embed.default", (X, 1, 0, 2)
    yield "aten.unfold.default", (FLAT, 0, 3, 1)
    yield "aten.as_strided.default", (X, (2, 2), (1, 2))
    yield "aten.as_strided.default", (X, (2, 2), (3, 1), 1)
    yield "aten.tril.default", (X,)
    yield "aten.triu.default", (X, 1)
    yield "aten.constant_pad_nd.default", (X, (1, 2), 7.0)
    yield "aten.constant_pad_nd.default", (X, (0, -1, 1, 0))
    yield "aten.cat.default", ((X, Y, X), -1)
    yield "aten.cat.default", ((X, Y),)
    yield "aten.concat.default", ((ROW, FLAT),)
    yield "aten.stack.default", ((X, Y), 1)
    yield "aten.stack.default", ((ONE, ONE, real(low=0.3)), -1)
    yield "aten.hstack.default", ((X, COLUMN),)
    yield "aten.vstack.default", ((X, ROW),)
    yield "aten.split.Tensor", (FLAT, 2)
    yield "aten.split.Tensor", (X, 2, -1)
    yield "aten.split_with_sizes.default", (FLAT, (1, 3, 1))
    yield "aten.unsafe_split.Tensor", (FLAT, 2)
    yield "aten.chunk.default", (FLAT, 2)
    yield "aten.unsafe_chunk.default", (FLAT, 2)
    yield "aten.unbind.int", (X, -1)
    yield "aten.gather.default", (X, 1, ints([[0, 0, 2, 1], [2, 1, 0, 0]]))
    yield "aten.gather.default", (X, -2, ints([[1, 0, 1]]))
    yield "aten.take_along_dim.default", (X, ints([[2], [0]]), 1)
    yield "aten.take.default", (X, ints([5, 0, 3]))
    yield "aten.index_select.default", (X, -1, ints([2, 2, 0]))
    yield "aten.index.Tensor", (X, (ints([1, 0, 1]),))
    yield "aten.index.Tensor", (X, (None, ints([-1, 0])))
    yield "aten.index.Tensor", (X, (ints([0, 1]), ints([2, 1])))
    yield "aten.index.Tensor", (X, (ints([[0], [1]]), ints([2, 1, 0])))
    yield "aten.index.Tensor", (X, (MASK,))
    yield "aten.index.Tensor", (CUBE, (MASK,))
    yield "aten.index.Tensor", (CUBE, (ints([1, 0]), None, ints([1, 1])))
    yield "aten.index.Tensor", (CUBE, (None, torch.tensor([True, False, True])))
    yield "aten._unsafe_index.Tensor", (X, (ints([1, 0]),))
    yield "aten.masked_select.default", (X, MASK)
    yield "aten.masked_select.default", (ROW, MASK)
    yield "aten.embedding.default", (real(5, 3), ints([[4, 0, 1], [0, 2, 2]]))
    yield "aten.embedding.default", (real(5, 3), ints([0, 2]), 2)
    yield "aten.where.self", (MASK, X, Y)
    yield "aten.where.self", (MASK, ROW, ONE)
    yield "aten.where.self", (COLUMN > 0.5, X, COLUMN)
    yield "aten.where.self", (MASK, X, X)
    yield "aten.where.ScalarOther", (MASK, X, -math.inf)
    yield "aten.where.ScalarSelf", (MASK, 0.0, X)
    yield "aten.masked_fill.Scalar", (X, MASK, -1e9)
    yield "aten.masked_fill.Scalar", (X, MASK[0], math.nan)
    yield "aten.masked_fill.Tensor", (X, MASK, ONE)
    yield "aten.masked_scatter.default", (X, MASK, FLAT)
    yield "aten.index_put.default", (X, (ints([1, 0]), ints([2, 0])), real(2, low=0.35))
    yield "aten.index_put.default", (X, (ints([1]),), ROW)
    yield "aten.index_put.default", (X, (MASK,), ONE)
    yield "aten.index_put.default", (X, (None, ints([0, 2])), COLUMN)
    yield "aten._unsafe_index_put.default", (X, (ints([1]),), ROW)
    yield "aten.index_copy.default", (X, 1, ints([2, 0]), real(2, 2, low=0.25))
    yield "aten.index_fill.int_Scalar", (X, 1, ints([2, 0]), 3.0)
    yield "aten.index_fill.int_Scalar", (X, 0, ints([1]), -math.inf)
    yield "aten.index_fill.int_Tensor", (X, 1, ints([2, 0]), ONE)
    yield "aten.scatter.src", (X, 1, ints([[0, 2], [1, 0]]), real(2, 3, low=0.25))
    yield "aten.scatter.value", (X, 1, ints([[0], [1]]), 3.0)
    yield "aten.put.default", (X, ints([5, 0]), real(2, low=0.35))
    yield "aten.select_scatter.default", (X, ROW, 0, 1)
    yield "aten.slice_scatter.default", (X, COLUMN, 1, 1, 2)
    yield "aten.slice_scatter.default", (X, real(2, 2, low=0.25), -1, 0, 3, 2)
    yield "aten.diagonal_scatter.default", (X, real(2, low=0.35), 1)


def reductions() -> Iterator[tuple[str, Args]]:
    for name in ("sum", "mean", "nansum", "nanmean", "prod", "max", "min", "median", "nanmedian", "amax", "amin", "linalg_vector_norm"):
        yield full(name), (X,)
        yield full(name), (ONE,)
    yield "aten.norm.Scalar", (X, 2)
    yield "aten.std.correction", (X,)
    yield "aten.var.correction", (X,)
    for name in ("sum.dim_IntList", "mean.dim", "nansum", "nanmean", "amax", "amin", "logsumexp", "std.correction", "var.correction"):
        for dims in ((0,), (-1,), (1, 0)):
            yield full(name), (X, dims)
        yield full(name), (CUBE, (0, -1))
    yield from (
        ("aten.sum.dim_IntList", (CUBE, (-2,), True)),
        ("aten.mean.dim", (CUBE, (0, 2), True)),
        ("aten.amax.default", (X, (-1,), True)),
        ("aten.logsumexp.default", (CUBE, (1,), True)),
        ("aten.sum.dim_IntList", (X, ())),
        ("aten.sum.dim_IntList", (X, None)),
        ("aten.sum.dim_IntList", (X, (), True)),
        ("aten.mean.dim", (ONE, (-1,))),
        ("aten.logsumexp.default", (ONE, (0,))),
        ("aten.max.dim", (X, -1)),
        ("aten.max.dim", (CUBE, 1, True)),
        ("aten.min.dim", (X, 0)),
        ("aten.median.dim", (X, -1)),
        ("aten.nanmedian.dim", (X, 0)),
        ("aten.prod.dim_int", (CUBE, -2)),
        ("aten.prod.dim_int", (X, 0, True)),
        ("aten.aminmax.default", (X,)),
        ("aten.std_mean.correction", (X, (1,))),
        ("aten.var_mean.correction", (CUBE, (-1, 0))),
        ("aten.std.dim", (X, (-1,))),
        ("aten.var.dim", (X, (0,), False, True)),
        ("aten.linalg_vector_norm.default", (X, 2, (-1,))),
        ("aten.linalg_vector_norm.default", (CUBE, 1, (0, 2), True)),
        ("aten.norm.ScalarOpt_dim", (X, 2, (1,))),
        ("aten.norm.ScalarOpt_dim", (X, 2, (0,), True)),
        ("aten.frobenius_norm.dim", (X, (0, 1))),
    )


def along() -> Iterator[tuple[str, Args]]:
    for name in ("_softmax", "_log_softmax"):
        for dim in (0, -1):
            yield full(name), (X, dim, False)
        yield full(name), (CUBE, 1, False)
        yield full(name), (ONE, 0, False)
    for name in ("softmax.int", "log_softmax.int", "_safe_softmax"):
        yield full(name), (X, -1)
    for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
        yield full(name), (X, -1)
        yield full(name), (CUBE, 1)
        yield full(name), (FLAT, 0)
    yield "aten.sort.default", (X,)
    yield "aten.sort.default", (X, 0, True)
    yield "aten.topk.default", (X, 2)
    yield "aten.topk.default", (CUBE, 1, 1)


def matmuls() -> Iterator[tuple[str, Args]]:
    a, b, c = real(2, 3), real(3, 4, low=0.2), real(2, 4, low=0.3)
    batched, other = real(2, 2, 3), real(2, 3, 2, low=0.2)
    yield "aten.mm.default", (a, b)
    yield "aten.mm.default", (real(1, 1), real(1, 1, low=0.2))
    yield "aten.bmm.default", (batched, other)
    yield "aten.addmm.default", (c, a, b)
    yield "aten.addmm.default", (real(4, low=0.3), a, b)
    yield "aten.addmm.default", (real(2, 1, low=0.3), a, b)
    yield "aten.baddbmm.default", (real(2, 2, low=0.3), batched, other)
    yield "aten.mv.default", (a, ROW)
    yield "aten.addmv.default", (real(2, low=0.4), a, ROW)
    yield "aten.addmv.default", (ONE, a, ROW)
    yield "aten.dot.default", (ROW, real(3, low=0.2))
    yield "aten.matmul.default", (a, b)
    yield "aten.matmul.default", (batched, other)
    yield "aten.linear.default", (a, real(4, 3, low=0.2), real(4, low=0.3))


def mixes() -> Iterator[tuple[str, Args]]:
    yield "aten.native_layer_norm.default", (X, (3,), ROW, real(3, low=0.2), 1e-5)
    yield "aten.scatter_add.default", (X, 1, ints([[0, 2], [1, 0]]), real(2, 3, low=0.25))
    yield "aten.scatter_reduce.two", (X, 1, ints([[0, 2], [1, 0]]), real(2, 3, low=0.25), "sum")
    yield "aten.index_add.default", (X, 1, ints([2, 0]), real(2, 2, low=0.25))
    yield "aten.convolution.default", (real(1, 1, 5), real(1, 1, 2), None, (1,), (0,), (1,), False, (0,), 1)
    yield "aten.cdist.default", (X, Y)
    yield "aten.trace.default", (real(3, 3),)
    yield "aten.diff.default", (CUBE, 2, 1)
    yield "aten.msort.default", (X,)
    yield "aten.renorm.default", (CUBE, 2, 1, 0.5)  # a norm over everything but one dimension
    yield "aten.prelu.default", (CUBE, ROW)  # a weight per channel, which is not the last dimension


def matrices() -> Iterator[tuple[str, Args]]:
    near = torch.eye(2, dtype=torch.float64) + 0.1 * real(2, 2, 2)
    yield "aten._linalg_det.default", (near,)
    yield "aten._linalg_slogdet.default", (near,)
    yield "aten._linalg_eigh.default", (near[0] @ near[0].T,)
    yield "aten.linalg_inv_ex.default", (near,)
    yield "aten._linalg_solve_ex.default", (near, real(2, 2, 3, low=0.2))
    yield "aten._linalg_solve_ex.default", (near, real(2, 2, low=0.2))
    yield "aten.linalg_matrix_exp.default", (near,)


def negative_log_likelihood() -> Iterator[tuple[str, Args]]:
    log_probs, targets = real(3, 4, low=-2, high=-0.1), ints([2, 0, 3])
    for reduction in (0, 1, 2):
        yield "aten.nll_loss_forward.default", (log_probs, targets, None, reduction, -100)
        yield "aten.nll_loss_forward.default", (log_probs, targets, None, reduction, 0)
    yield "aten.nll_loss_forward.default", (log_probs[0], torch.tensor(2), None, 1, -100)


EXACT = [
    case
    for case in (*pointwise(), *moves(), *reductions(), *along(), *matmuls(), *negative_log_likelihood())
    if flow_of(case[0]) is not None
]  # an operator that leaves the table takes its cases with it
LOOSE = [*mixes(), *matrices()]
# Told as "from anywhere" on purpose: torch takes them apart before a tape sees them, so only a file can hold them.
ROUGH = frozenset(("aten.matmul.default", "aten.linear.default"))
ASIDE = {  # outputs that say which, or how many, beside the values
    "aten.nll_loss_forward.default": (1,),
}


# -- the truth -------------------------------------------------------------------------------------------------------------


def laid(content: Tensor, like: Tensor) -> Tensor:
    """Content in memory as `like` lies there."""
    if content.is_contiguous() and like.is_contiguous():
        return content
    out = torch.empty_strided(like.shape, like.stride(), dtype=content.dtype)
    out.copy_(content)
    return out


def others(tensor: Tensor, position: int) -> Iterator[Tensor]:
    """The tensor with one element replaced by something else, in several ways."""
    now = tensor.flatten()[position]
    if tensor.is_floating_point():
        values: list[Any] = [math.nan, 1e3, -1e3, float(now) + 0.01]
    else:
        values = [int(now) ^ 1, ~int(now), 0, 13]
    for value in values:
        changed = tensor.flatten().clone()
        changed[position] = value
        yield laid(changed.reshape(tensor.shape), tensor)


class Rig:
    """One call with the values it reads and makes; tensors that are the same object are one value."""

    def __init__(self, op: str, args: Args) -> None:
        self.values: dict[int, Tensor] = {}
        self.known: dict[int, list[Tensor]] = {}
        known: dict[int, int] = {}

        def noted(arg: Any) -> Any:
            if isinstance(arg, Tensor):
                value = known.setdefault(id(arg), len(known))
                self.values[value] = arg
                return Ref(value)
            return tuple(noted(item) for item in arg) if isinstance(arg, tuple) else arg

        self.args = tuple(noted(arg) for arg in args)
        self.inputs = list(self.values)
        self.function = overload(op)
        results = self.run({})
        self.call = Call(op, self.args, (), tuple(range(100, 100 + len(results))))
        self.values.update(zip(range(100, 100 + len(results)), results, strict=True))
        name = base_name(op)
        carries = PAYLOAD.get(name, (0,)) if flow_of(op) is Flow.MOVE else (0,) if name == "nll_loss_forward" else range(len(args))
        self.carriers = sorted({v for p in carries if p < len(args) for v in inner(self.args[p]) if self.counts(self.values[v])})

    def counts(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() or "bitwise" in self.function._schema.name

    def says_which(self, out: int) -> bool:
        """The positions that a sort or a maximum gives beside its values."""
        return not self.counts(self.values[out])

    def run(self, replaced: dict[int, Tensor]) -> list[Tensor]:
        def resolved(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return replaced.get(arg.id, self.values[arg.id])
            return [resolved(item) for item in arg] if isinstance(arg, tuple) else arg

        result = self.function(*[resolved(arg) for arg in self.args])
        return [tensor.clone() for tensor in (result if isinstance(result, (tuple, list)) else [result])]

    def truth(self, value: int) -> list[Tensor]:
        """For every result a bool matrix [its elements, elements of the value]: does one move when the other changes?"""
        if value not in self.known:
            self.known[value] = self.found_out(value)
        return self.known[value]

    def found_out(self, value: int) -> list[Tensor]:
        before = [self.values[out] for out in self.call.outs if out is not None]
        tensor = self.values[value]
        matrices = [torch.zeros(result.numel(), tensor.numel(), dtype=torch.bool) for result in before]
        for position in range(tensor.numel()):
            for changed in others(tensor, position):
                for matrix, old, new in zip(matrices, before, self.run({value: changed}), strict=True):
                    matrix[:, position] |= ((old != new) & ~(old.isnan() & new.isnan())).flatten()
        return matrices


def inner(arg: Any) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            yield from inner(item)


def transposed(args: Args) -> Args:
    """The same numbers, laid out the other way round."""
    memo: dict[int, Tensor] = {}

    def turn(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dim() >= 2:
            return memo.setdefault(id(arg), arg.transpose(-1, -2).contiguous().transpose(-1, -2))
        return tuple(turn(item) for item in arg) if isinstance(arg, tuple) else arg

    return turn(args)


def sparse_strides(args: Args) -> Args:
    """The same numbers as a slice of something larger: gaps between the elements, and an offset in front."""
    memo: dict[int, Tensor] = {}

    def turn(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dim() >= 1 and arg.is_floating_point():
            wide = torch.full((*arg.shape[:-1], 2 * arg.shape[-1] + 1), 0.123, dtype=arg.dtype)[..., 1::2]
            return memo.setdefault(id(arg), wide.copy_(arg))
        return tuple(turn(item) for item in arg) if isinstance(arg, tuple) else arg

    return turn(args)


LAYOUTS: dict[str, Callable[[Args], Args]] = {"plain": lambda args: args, "transposed": transposed, "strided": sparse_strides}


def check_sources(rig: Rig, exact: bool, skip: tuple[int, ...] = ()) -> None:
    """Every element that `sources` names can move the result, and (if exact) no other one can."""
    truth = {value: rig.truth(value) for value in rig.carriers}
    for number, out in enumerate(rig.call.outs):
        if out is None or number in skip or rig.says_which(out):
            continue
        for flat in range(rig.values[out].numel()):
            named = {value: torch.zeros(rig.values[value].numel(), dtype=torch.bool) for value in rig.inputs}
            for source in sources(rig.call, rig.values, out, flat):
                assert source.value in inner(rig.call.args[source.argument]), "the position names another argument"
                assert source.flat.dim() == 1 and bool((source.flat >= 0).all()), "an index that does not exist"
                named[source.value][source.flat] = True
            for value in rig.inputs:
                wanted = truth[value][number][flat] if value in truth else torch.zeros_like(named[value])
                where = f"{rig.call.op}: element {flat} of result {number} from value {value}"
                if exact:
                    if value in truth or not rig.counts(rig.values[value]):
                        got = named[value] if value in truth else named[value] & False
                        assert got.tolist() == wanted.tolist(), where
                else:
                    assert not bool((wanted & ~named[value]).any()), where


def check_spread(rig: Rig, exact: bool, skip: tuple[int, ...] = ()) -> None:
    """The marked results are those that some marked element can move."""
    truth = {value: rig.truth(value) for value in rig.carriers}
    random = torch.Generator().manual_seed(1)
    marks: list[dict[int, Tensor]] = []
    for value in rig.carriers:
        tensor = rig.values[value]
        for flat in range(tensor.numel()):
            one = torch.zeros(tensor.numel(), dtype=torch.bool)
            one[flat] = True
            marks.append({value: one.reshape(tensor.shape)})
    for _ in range(4):
        marks.append({value: torch.rand(rig.values[value].shape, generator=random) > 0.7 for value in rig.carriers})
    marks.append({})
    for marked in marks:
        got = spread(rig.call, rig.values, marked)
        for number, out in enumerate(rig.call.outs):
            if out is None or number in skip or rig.says_which(out):
                continue
            wanted = torch.zeros(rig.values[out].numel(), dtype=torch.bool)
            for value, mark in marked.items():
                wanted |= (truth[value][number] & mark.flatten()).any(dim=1)
            found = got.get(out, torch.zeros(rig.values[out].shape, dtype=torch.bool))
            assert found.shape == rig.values[out].shape and found.dtype is torch.bool
            if exact:
                assert found.flatten().tolist() == wanted.tolist(), f"{rig.call.op}: result {number} of {marked}"
                assert (out in got) == bool(wanted.any())
            else:
                assert not bool((wanted & ~found.flatten()).any()), f"{rig.call.op}: result {number} of {marked}"


def check_behind(rig: Rig) -> None:
    """What several elements came of is what each of them did."""
    random = torch.Generator().manual_seed(2)
    for out in (one for one in rig.call.outs if one is not None and not rig.says_which(one)):
        for share in (0.0, 0.4, 1.0):
            marked = torch.rand(rig.values[out].shape, generator=random) < share
            got = behind(rig.call, rig.values, out, marked)
            named = {value: torch.zeros(rig.values[value].numel(), dtype=torch.bool) for value in got}
            for flat in marked.flatten().nonzero().flatten().tolist():
                for source in (one for one in sources(rig.call, rig.values, out, flat) if one.value in named):
                    named[source.value][source.flat] = True
            for value, own in got.items():
                assert own.shape == rig.values[value].shape and own.flatten().tolist() == named[value].tolist(), rig.call.op


def check_origins(rig: Rig) -> None:
    """Those of several elements are those of each, together."""
    random = torch.Generator().manual_seed(2)
    for out in rig.call.outs:
        if out is None or element_flow(rig.call) is Flow.CREATE or rig.call.name in SELECTORS:
            continue
        flats = (torch.rand(rig.values[out].numel(), generator=random) < 0.4).nonzero().flatten()
        if not len(flats):
            continue
        named: dict[int, set[int]] = {}
        for flat in flats.tolist():
            for source in sources(rig.call, rig.values, out, flat):
                named.setdefault(source.value, set()).update(source.flat.tolist())
        found = origins(rig.call, rig.values, out, flats, 1 << 16)
        joined = {value: own for value, own in named.items() if own}
        assert {value: set(own.tolist()) for value, own in found.items() if len(own)} == joined, f"{rig.call.op}: {flats.tolist()}"


def label(case: tuple[str, Args]) -> str:
    def shown(arg: Any) -> str:
        if isinstance(arg, Tensor):
            return "×".join(map(str, arg.shape)) or "·"
        return f"({','.join(map(shown, arg))})" if isinstance(arg, tuple) else str(arg)

    return f"{case[0].removeprefix('aten.').removesuffix('.default')}({','.join(map(shown, case[1]))})"


@pytest.mark.parametrize("case", EXACT, ids=label)
def test_the_flow_of_elements_is_exact(case: tuple[str, Args]) -> None:
    """Forth and back: an element is named if, and only if, changing it can change the result; however the tensors lie in memory."""
    op, args = case
    for layout, arranged in LAYOUTS.items():
        if layout == "strided" and op in BY_STRIDES:
            continue  # reads between the elements
        try:
            rig = Rig(op, arranged(args))
        except RuntimeError:
            assert layout != "plain"
            continue  # a view of these strides does not exist
        check_sources(rig, op not in ROUGH, ASIDE.get(op, ()))
        check_spread(rig, op not in ROUGH, ASIDE.get(op, ()))
        check_behind(rig)
        check_origins(rig)


def test_the_origins_of_a_whole_tensor_over_the_vocabulary_are_asked_at_once() -> None:
    """One by one, each with all of its line, they would be 200 million positions."""
    rig = Rig("aten._log_softmax.default", (torch.zeros(12, 4096), 1, False))
    (out,) = rig.call.outs
    assert out is not None
    found = origins(rig.call, rig.values, out, torch.arange(11 * 4096), 1 << 16)
    assert torch.equal(found[rig.inputs[0]], torch.arange(11 * 4096))


@pytest.mark.parametrize("offset", [None, 1, 2])
def test_memory_between_the_elements_is_nobodys(offset: int | None) -> None:
    """`as_strided` speaks of memory: where a view has gaps it may read what is no element of it, and that has no source."""
    x = torch.arange(7.0)[1::2]
    rig = Rig("aten.as_strided.default", (x, (3,), (1,), offset))
    told = [[(s.value, s.flat.tolist()) for s in sources(rig.call, rig.values, 100, flat)] for flat in range(3)]
    wanted = [[], [(0, [1])], []] if offset == 2 else [[(0, [0])], [], [(0, [1])]]
    assert told == wanted
    marked = spread(rig.call, rig.values, {0: torch.tensor([False, True, False])})
    assert marked[100].tolist() == [False, offset == 2, offset != 2]


@pytest.mark.parametrize("case", LOOSE, ids=label)
def test_a_flow_without_a_finer_rule_misses_nothing(case: tuple[str, Args]) -> None:
    """What mixes everything names too many elements, never too few."""
    rig = Rig(*case)
    check_sources(rig, exact=False)
    check_spread(rig, exact=False)


def test_a_matrix_of_a_batch_keeps_to_itself() -> None:
    """What is made of one matrix comes from that one, and from what stands beside it for the whole batch."""
    near, sides = torch.eye(2, dtype=torch.float64) + 0.1 * real(3, 2, 2), real(3, 2, 1)
    rig = Rig("aten._linalg_solve_ex.default", (near, sides))
    assert [source.flat.tolist() for source in sources(rig.call, rig.values, 100, 2)] == [[4, 5, 6, 7], [2, 3]]
    marked = torch.zeros(3, 2, 2, dtype=torch.bool)
    marked[1, 0, 1] = True
    assert spread(rig.call, rig.values, {0: marked})[100].flatten().tolist() == [False, False, True, True, False, False]


def test_every_operator_with_a_rule_is_checked() -> None:
    """A row of the table that no case covers could flow any way."""
    covered = {base_name(op) for op, _ in EXACT} | SELECTORS
    wanted = {name for name, flow in FLOW.items() if flow in (Flow.POINTWISE, Flow.MOVE, Flow.REDUCE, Flow.ALONG, Flow.MATMUL)}
    assert wanted - covered == set()
    assert {base_name(op) for op, _ in LOOSE} <= {name for name, flow in FLOW.items() if flow in (Flow.MIX, Flow.MATRIX)}


@pytest.mark.parametrize("flow", [Flow.MOVE, Flow.POINTWISE])
def test_an_overload_that_combines_elements_is_not_a_copy(flow: Flow) -> None:
    """`index_put(accumulate=True)`, `scatter(reduce="add")` and `max(x, y)` are other functions under the same name: nothing is missed."""
    cases: dict[Flow, list[tuple[str, Args]]] = {
        Flow.MOVE: [
            ("aten.index_put.default", (X, (ints([1, 1]),), real(2, 3, low=0.25), True)),
            ("aten.put.default", (X, ints([5, 0]), real(2, low=0.35), True)),
            ("aten.scatter.reduce", (X, 1, ints([[0, 2], [1, 0]]), real(2, 3, low=0.25))),
            ("aten.scatter.value_reduce", (X, 1, ints([[0], [1]]), 3.0)),
        ],
        Flow.POINTWISE: [("aten.max.other", (X, Y)), ("aten.min.other", (X, ROW))],
    }
    for op, args in cases[flow]:
        if "reduce" in op:
            rig = ReduceRig(op, args)
        else:
            rig = Rig(op, args)
        check_sources(rig, exact=False)
        check_spread(rig, exact=False)


class ReduceRig(Rig):
    """`scatter` with `reduce="add"`, which is a keyword-only argument."""

    def __init__(self, op: str, args: Args) -> None:
        super().__init__(op, args)
        self.call = Call(op, self.args, (("reduce", "add"),), self.call.outs)

    def run(self, replaced: dict[int, Tensor]) -> list[Tensor]:
        original, self.function = self.function, lambda *args: original(*args, reduce="add")
        try:
            return super().run(replaced)
        finally:
            self.function = original


# -- drawn cases -----------------------------------------------------------------------------------------------------------


@st.composite
def broadcasting(draw: st.DrawFn) -> tuple[str, Args]:
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    pair = []
    for low in (0.1, 0.3):
        own = [1 if draw(st.booleans()) else n for n in shape][draw(st.integers(0, len(shape))) :]
        pair.append(real(*own, low=low))
    return draw(st.sampled_from(["aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default"])), tuple(pair)


@st.composite
def reducing(draw: st.DrawFn) -> tuple[str, Args]:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    signed = tuple(dim - len(shape) if draw(st.booleans()) else dim for dim in dims)
    op = draw(st.sampled_from(["aten.sum.dim_IntList", "aten.amax.default", "aten.mean.dim", "aten.logsumexp.default"]))
    return op, (real(*shape), signed, draw(st.booleans()))


@st.composite
def indexing(draw: st.DrawFn) -> tuple[str, Args]:
    """Advanced indexing of any kind: ints of any shape, bools, gaps, and writing through them."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    pattern = draw(st.lists(st.integers(1, 2), max_size=2))  # the shape that all integer indices broadcast to
    index: list[Any] = []
    position = 0
    while position < len(shape) and draw(st.booleans() if index else st.just(True)):
        kind = draw(st.sampled_from(["int", "none", "bool"]))
        if kind == "bool" and pattern != [1] and any(isinstance(i, Tensor) for i in index):
            kind = "none"
        if kind == "int":
            own = [1 if draw(st.booleans()) else n for n in pattern]
            values = draw(st.lists(st.integers(-shape[position], shape[position] - 1), min_size=math.prod(own), max_size=math.prod(own)))
            index.append(torch.tensor(values, dtype=torch.int64).reshape(own))
        elif kind == "bool":
            index.append(torch.tensor(draw(st.lists(st.booleans(), min_size=shape[position], max_size=shape[position]))))
        else:
            index.append(None)
        position += 1
    x = real(*shape)
    if all(i is None for i in index):
        index[0] = torch.tensor([0])
    if draw(st.booleans()):
        return "aten.index.Tensor", (x, tuple(index))
    return "aten.index_put.default", (x, tuple(index), real(low=0.77) if draw(st.booleans()) else real(1, low=0.77))


@st.composite
def slicing(draw: st.DrawFn) -> tuple[str, Args]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    start, step = draw(st.integers(-4, 4)), draw(st.integers(1, 3))
    x = real(*shape)
    choice = draw(st.sampled_from(["slice", "flip", "roll", "gather", "cat", "topk", "cumsum"]))
    if choice == "slice":
        return "aten.slice.Tensor", (x, dim, start, draw(st.integers(-4, 9)), step)
    if choice == "gather":
        own = list(shape)
        own[dim] = draw(st.integers(0, 3))
        values = draw(st.lists(st.integers(0, shape[dim] - 1), min_size=math.prod(own), max_size=math.prod(own)))
        return "aten.gather.default", (x, dim, torch.tensor(values, dtype=torch.int64).reshape(own))
    if choice == "cat":
        return "aten.cat.default", ((x, real(*shape, low=0.3), x), dim)
    if choice == "topk":
        return "aten.topk.default", (x, draw(st.integers(1, shape[dim])), dim)
    if choice == "cumsum":
        return "aten.cumsum.default", (x, dim)
    return ("aten.flip.default", (x, (dim,))) if choice == "flip" else ("aten.roll.default", (x, (start,), (dim,)))


@settings(max_examples=120)
@given(st.one_of(broadcasting(), reducing(), indexing(), slicing()), st.sampled_from(list(LAYOUTS)))
def test_drawn_calls_flow_exactly(case: tuple[str, Args], layout: str) -> None:
    """Shapes, dimensions, indices and layouts that nobody thought of."""
    op, args = case
    try:
        rig = Rig(op, LAYOUTS[layout](args))
    except (RuntimeError, IndexError):
        return  # indices that do not go together
    check_sources(rig, exact=True)
    check_spread(rig, exact=True)


# -- the gradient agrees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in EXACT if case[0] not in ROUGH and "bitwise" not in case[0]], ids=label)
def test_a_gradient_flows_only_where_elements_do(case: tuple[str, Args]) -> None:
    """Where autograd gives a derivative that is not 0, the element is among the sources: what backward reaches, the walk reaches."""
    rig = Rig(*case)
    leaves = {v: rig.values[v].clone().requires_grad_() for v in rig.carriers}
    try:
        with torch.enable_grad():
            results = rig.function(*[_resolved(arg, {**rig.values, **leaves}) for arg in rig.args])
    except RuntimeError:
        return
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    for out, result in zip(rig.call.outs, results, strict=True):
        if out is None or not result.requires_grad:
            continue
        for flat in range(result.numel()):
            try:
                grads = torch.autograd.grad(result.flatten()[flat], list(leaves.values()), retain_graph=True, allow_unused=True)
            except RuntimeError:
                return  # has no derivative
            named = {(s.value, int(i)) for s in sources(rig.call, rig.values, out, flat) for i in s.flat}
            for value, grad in zip(leaves, grads, strict=True):
                reached = set() if grad is None else {(value, int(i)) for i in grad.flatten().nonzero().flatten()}
                assert reached <= named, f"element {flat} of {out}"


def _resolved(arg: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.id]
    return [_resolved(item, values) for item in arg] if isinstance(arg, tuple) else arg


# -- what carries nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_selector_has_no_sources(name: str) -> None:
    """A comparison or an argmax says which: neither harm nor gradient passes through it."""
    call = Call(f"aten.{name}.default", (Ref(0), Ref(0)), (), (1,))
    values = {0: X, 1: X > 0}
    assert sources(call, values, 1, 0) == [] and spread(call, values, {0: MASK}) == {}


@pytest.mark.parametrize("name", sorted(name for name, flow in FLOW.items() if flow is Flow.CREATE))
def test_what_is_created_comes_from_nowhere(name: str) -> None:
    """`zeros_like(x)` takes the shape of x, not its elements."""
    call = Call(f"aten.{name}.default", (Ref(0),), (), (1,))
    assert sources(call, {0: X, 1: X}, 1, 0) == [] and spread(call, {0: X, 1: X}, {0: MASK}) == {}


def test_results_that_nobody_reads_are_left_out() -> None:
    """A call whose second result has no id."""
    values = {0: X, 1: X.max(1).values}
    call = Call("aten.max.dim", (Ref(0), 1), (), (1, None))
    assert [source.flat.tolist() for source in sources(call, values, 1, 1)] == [[3, 4, 5]]
    assert {out: mark.tolist() for out, mark in spread(call, values, {0: MASK}).items()} == {1: [True, True]}
    split = Call("aten.split.Tensor", (Ref(0), 2, 1), (), (None, 1))
    values = {0: X, 1: X[:, 2:]}
    assert [source.flat.tolist() for source in sources(split, values, 1, 1)] == [[5]]
    assert {out: mark.tolist() for out, mark in spread(split, values, {0: MASK}).items()} == {1: [[True], [True]]}


def test_constants_have_no_source() -> None:
    """What a fill or a padding wrote came from no element, also when the constant looks like an element."""
    filled = Rig("aten.masked_fill.Scalar", (X, MASK, 1))
    assert sources(filled.call, filled.values, 100, 0) == []
    padded = Rig("aten.constant_pad_nd.default", (X, (1, 0), 2.0))
    assert sources(padded.call, padded.values, 100, 0) == []
    chosen = Rig("aten.where.ScalarSelf", (MASK, 1, X))
    assert sources(chosen.call, chosen.values, 100, 0) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_copies_of_any_dtype_are_followed(dtype: torch.dtype) -> None:
    """Where an element was does not depend on how coarse its numbers are: half precision cannot count to 5000, positions can."""
    x = torch.arange(5000).remainder(2).to(dtype)
    call = Call("aten.flip.default", (Ref(0), (0,)), (), (1,))
    assert [source.flat.tolist() for source in sources(call, {0: x, 1: x.flip(0) if dtype.itemsize > 1 else x}, 1, 1)] == [[4998]]


def test_many_contributors_are_no_trouble() -> None:
    """A sum over more elements than anybody looks at one by one."""
    x = torch.zeros(70_000)
    (source,) = sources(Call("aten.sum.default", (Ref(0),), (), (1,)), {0: x, 1: x.sum()}, 1, 0)
    assert source.flat.numel() == 70_000


def test_empty_tensors_are_no_trouble() -> None:
    """A sum over nothing comes from nothing; a cat with an empty tensor comes from the other one."""
    empty = torch.zeros(0, 3)
    (source,) = sources(Call("aten.sum.dim_IntList", (Ref(0), (0,)), (), (1,)), {0: empty, 1: empty.sum(0)}, 1, 2)
    assert source.flat.tolist() == []
    call = Call("aten.cat.default", ((Ref(0), Ref(1)),), (), (2,))
    values = {0: empty, 1: X.float(), 2: torch.cat([empty, X.float()])}
    assert [(s.value, s.flat.tolist()) for s in sources(call, values, 2, 4)] == [(1, [4])]
    assert {out: mark.sum().item() for out, mark in spread(call, values, {1: MASK}).items()} == {2: 3}


# -- reading elements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "position"),
    [
        (torch.tensor([1.0, math.inf, math.nan]), 1),
        (torch.tensor([[0.0, 1.0], [-math.inf, 2.0]]), 2),
        (torch.tensor([[0.0, -math.inf], [1.0, 2.0]]).t(), 2),
        (torch.tensor([1.0, 2.0]), None),
        (torch.tensor(math.nan), 0),
        (torch.zeros(0), None),
        (torch.tensor([1, 2]), None),
        (torch.tensor([True]), None),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), 1),
        (torch.tensor([1.0, math.inf]).to(torch.float8_e5m2), 1),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), None),
        (torch.tensor([1.0, math.nan], dtype=torch.bfloat16), 1),
        (torch.tensor([1 + 1j, complex(0, math.nan)]), 1),
        (torch.tensor([1e300], dtype=torch.float64), None),
    ],
)
def test_the_first_nonfinite_element(tensor: Tensor, position: int | None) -> None:
    """In row-major order, whatever the dtype and the layout."""
    assert first_nonfinite(tensor) == position


def test_one_element_as_a_number() -> None:
    """Any real dtype, any layout; row-major."""
    assert at(torch.arange(6.0).reshape(2, 3).t(), 1) == 3.0
    assert at(torch.tensor(2.5, dtype=torch.bfloat16), 0) == 2.5
    assert at(torch.tensor([1, 7]), 1) == 7.0
    assert at(torch.tensor([1.5]).to(torch.float8_e5m2), 0) == 1.5
