"""How calls are written: what a script says is what the operator does, for every operator that a program may hold."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from idioms import Called, calls_of_samples
from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Arg, Call, Computes, Leaf, Ref
from nanscope.program.ops import FLOW
from nanscope.program.program import Program
from nanscope.program.spelling import Phrase
from nanscope.reproduce.alike import Case
from nanscope.reproduce.idioms import ROWS, Asked, generic, idiom
from nanscope.reproduce.names import Remembered
from nanscope.reproduce.script import source_of
from tests.conftest import NIGHTLY

EVERY = 1 if NIGHTLY else 9  # of torch's operators, one in so many by day


def ran(text: str, output: str) -> Tensor:
    """What a script makes."""
    known: dict[str, Any] = {}
    exec(compile(text, "script", "exec"), known)  # ours, and made of torch's samples
    found = eval(output, known)
    assert isinstance(found, Tensor)
    return found


def source(case: Case) -> tuple[str, str]:
    names = Remembered(Names(case.program), (), Names(case.program))
    draft = source_of(case, names, None, [])
    return "\n".join(["import torch", *(line for lines in draft.leaves.values() for line in lines), *draft.body]), draft.output


def is_said_rightly(called: Called) -> None:
    text, output = source(called.case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ran(text, output)
    wanted = called.results[0]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), text
    assert torch.allclose(got.nan_to_num(7.5), wanted.nan_to_num(7.5)) if got.is_floating_point() else torch.equal(got, wanted), text


def test_what_torch_samples_make_is_said_as_it_is() -> None:
    """Each call that torch's own samples of its operators make, written and run again, gives the same."""
    found = list(calls_of_samples(EVERY))
    assert len({called.call.name for called in found}) > (150 if NIGHTLY else 40)
    for called in found:
        is_said_rightly(called)


F, G = torch.tensor([[0.5, -1.5, 2.0], [1.0, 0.25, -3.0]]), torch.tensor([[2.0, 1.0, -1.0], [1.0, 4.0, 0.5]])
B, C = torch.tensor([[True, False, True], [False, False, True]]), torch.tensor([[True, True, False], [False, True, True]])
H, J = torch.tensor([[0, 2, 1], [1, 0, 2]]), torch.tensor([[3, 1, 2], [1, 5, 1]])
X, Y = Ref(0), Ref(1)

WRITTEN: list[tuple[str, tuple[Tensor, ...], tuple[Arg, ...], dict[str, Arg], str]] = [
    ("add.Tensor", (F, G), (X, Y), {}, "x + x_2"),
    ("add.Tensor", (F, G), (X, Y), {"alpha": -2}, "x + -2 * x_2"),
    ("sub.Tensor", (F, G), (X, 3), {}, "x - 3"),
    ("rsub.Scalar", (F,), (X, 1), {}, "1 - x"),
    ("div.Tensor_mode", (F, G), (X, Y), {"rounding_mode": "floor"}, 'torch.div(x, x_2, rounding_mode="floor")'),
    ("pow.Tensor_Scalar", (F,), (X, 2), {}, "x ** 2"),
    ("pow.Tensor_Scalar", (G,), (X, -1), {}, "x ** -1"),
    ("neg.default", (F,), (X,), {}, "-x"),
    ("bitwise_not.default", (B,), (X,), {}, "~x"),
    ("bitwise_and.Tensor", (B, C), (X, Y), {}, "x & x_2"),
    ("bitwise_or.Tensor", (B, C), (X, Y), {}, "x | x_2"),
    ("bitwise_xor.Tensor", (B, C), (X, Y), {}, "x ^ x_2"),
    ("bitwise_left_shift.Tensor", (H, J), (X, Y), {}, "x << x_2"),
    ("logical_and.default", (B, C), (X, Y), {}, "torch.logical_and(x, x_2)"),
    ("logical_not.default", (B,), (X,), {}, "torch.logical_not(x)"),
    ("gt.Scalar", (F,), (X, 0.0), {}, "x > 0.0"),
    ("ge.Tensor", (F, G), (X, Y), {}, "x >= x_2"),
    ("eq.Scalar", (F,), (X, float("inf")), {}, "x == torch.inf"),
    ("isfinite.default", (F,), (X,), {}, "torch.isfinite(x)"),
    ("all.dim", (B,), (X, 1), {}, "x.all(dim=1)"),
    ("argmax.default", (F,), (X, -1), {}, "x.argmax(dim=-1)"),
    ("floor_divide.default", (F, G), (X, Y), {}, "torch.floor_divide(x, x_2)"),
    ("sum.dim_IntList", (F,), (X, (-1,), True), {}, "x.sum(dim=-1, keepdim=True)"),
    ("sum.default", (F,), (X,), {"dtype": torch.float64}, "x.sum(dtype=torch.float64)"),
    ("mean.dim", (F,), (X, (0, 1)), {}, "x.mean(dim=[0, 1])"),
    ("std.correction", (F,), (X, (1,)), {"correction": 1, "keepdim": True}, "x.std(dim=1, keepdim=True)"),
    ("var.correction", (F,), (X, None), {"correction": 0}, "x.var(correction=0)"),
    ("amax.default", (F,), (X, (-1,), True), {}, "torch.amax(x, dim=-1, keepdim=True)"),
    ("logsumexp.default", (F,), (X, (-1,)), {}, "torch.logsumexp(x, dim=-1)"),
    ("_softmax.default", (F,), (X, -1, False), {}, "torch.softmax(x, dim=-1)"),
    ("_log_softmax.default", (F,), (X, -1, False), {}, "torch.log_softmax(x, dim=-1)"),
    ("cumsum.default", (F,), (X, 1), {}, "x.cumsum(dim=1)"),
    ("where.self", (B, F, G), (X, Y, Ref(2)), {}, "torch.where(x, x_2, x_3)"),
    ("where.ScalarOther", (B, F), (X, Y, 0.0), {}, "torch.where(x, x_2, 0.0)"),
    ("masked_fill.Scalar", (F, B), (X, Y, float("-inf")), {}, "x.masked_fill(x_2, -torch.inf)"),
    ("gather.default", (F, H), (X, 1, Y), {}, "torch.gather(x, dim=1, index=x_2)"),
    ("index.Tensor", (F, B), (X, (Y,)), {}, "x[x_2]"),
    ("index.Tensor", (F, torch.tensor([2, 0])), (X, (None, Y)), {}, "x[:, x_2]"),
    ("select.int", (F,), (X, 1, -1), {}, "x[:, -1]"),
    ("select.int", (F,), (X, -1, 0), {}, "x[..., 0]"),
    ("slice.Tensor", (F,), (X, 1, 1, 9223372036854775807), {}, "x[:, 1:]"),
    ("slice.Tensor", (F,), (X, 1, 0, -1), {}, "x[:, :-1]"),
    ("view.default", (F,), (X, (3, 2)), {}, "x.reshape(3, 2)"),
    ("expand.default", (torch.ones(2, 1),), (X, (2, 3)), {}, "x.expand(2, 3)"),
    ("permute.default", (F,), (X, (1, 0)), {}, "x.permute(1, 0)"),
    ("t.default", (F,), (X,), {}, "x.t()"),
    ("_to_copy.default", (F,), (X,), {"dtype": torch.float64}, "x.double()"),
    ("_to_copy.default", (F,), (X,), {"dtype": torch.bfloat16}, "x.bfloat16()"),
    ("clamp.default", (F,), (X, None, 1.0), {}, "x.clamp(max=1.0)"),
    ("clamp.default", (F,), (X, -1.0, 1.0), {}, "x.clamp(min=-1.0, max=1.0)"),
    ("clamp_min.default", (F,), (X, 0.0), {}, "torch.clamp_min(x, min=0.0)"),
    ("reciprocal.default", (G,), (X,), {}, "1 / x"),
    ("full.default", (F,), ((2, 3), 0.5), {"device": torch.device("cpu"), "pin_memory": False}, "torch.full((2, 3), 0.5)"),
    ("zeros_like.default", (F,), (X,), {"pin_memory": False}, "torch.zeros_like(x)"),
    ("arange.start", (F,), (1, 4), {}, "torch.arange(1, 4)"),
    ("cat.default", (F, G), ((X, Y), 1), {}, "torch.cat([x, x_2], dim=1)"),
    ("stack.default", (F, G), ((X, Y),), {}, "torch.stack([x, x_2])"),
    ("embedding.default", (F, torch.tensor([1, 0])), (X, Y), {}, "x[x_2]"),
    ("mse_loss.default", (F, G), (X, Y, 2), {}, 'torch.nn.functional.mse_loss(x, x_2, reduction="sum")'),
    ("binary_cross_entropy_with_logits.default", (F, G), (X, Y), {}, "torch.nn.functional.binary_cross_entropy_with_logits(x, x_2)"),
    ("linalg_vector_norm.default", (F,), (X, 2, (1,)), {}, "torch.linalg.vector_norm(x, dim=1)"),
    ("mm.default", (F, torch.ones(3, 2)), (X, Y), {}, "x @ x_2"),
    ("max.other", (F, G), (X, Y), {}, "torch.max(x, x_2)"),
    ("scatter.src", (F, H, G), (X, 1, Y, Ref(2)), {}, "x.scatter(dim=1, index=x_2, src=x_3)"),
    ("constant_pad_nd.default", (F,), (X, (1, 0), 0.0), {}, "torch.ops.aten.constant_pad_nd.default(x, [1, 0], 0.0)"),
]


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: f"{row[0]} {row[4]}")
def test_a_call_is_written_as_people_write_it(row: tuple[str, tuple[Tensor, ...], tuple[Arg, ...], dict[str, Arg], str]) -> None:
    """And what is written does the same."""
    op, tensors, args, kwargs, wanted = row
    call = Call(f"aten.{op}", args, tuple(sorted(kwargs.items())), (9,))
    pieces = {value: Phrase("x" if not value else f"x_{value + 1}") for value in range(len(tensors))}
    assert idiom(Asked.of(call, pieces)).text == wanted
    leaves = tuple(Leaf(value, "x", "data", False) for value in range(len(tensors)))
    program = Program(leaves, (call,), 9, (), Computes.ACTIVATION)
    contents = dict(enumerate(tensors))
    is_said_rightly(Called(Case(program, contents), (program.execute(contents, backward=False).values[9],)))


def test_brackets_stand_where_python_needs_them() -> None:
    """`(a - b) * c`, `-(a * b)`, `a - (b - c)`, `(-a) ** 2`: as the calls were nested, and not as they would be read without."""
    a, b, c = (torch.tensor([n]) for n in (3.0, 5.0, 7.0))
    calls = [
        Call("aten.sub.Tensor", (Ref(0), Ref(1)), (), (3,)),
        Call("aten.mul.Tensor", (Ref(3), Ref(2)), (), (4,)),
        Call("aten.sub.Tensor", (Ref(1), Ref(4)), (), (5,)),
        Call("aten.neg.default", (Ref(5),), (), (6,)),
        Call("aten.pow.Tensor_Scalar", (Ref(6), 2), (), (7,)),
        Call("aten.gt.Scalar", (Ref(7), 1), (), (8,)),
        Call("aten.bitwise_not.default", (Ref(8),), (), (9,)),
        Call("aten.sum.default", (Ref(9),), (), (10,)),
    ]
    leaves = tuple(Leaf(value, name, "data", False) for value, name in enumerate("abc"))
    for end in range(3, 11):
        program = Program(leaves, tuple(calls), end, (), Computes.ACTIVATION).slice()
        contents = {leaf.id: (a, b, c)[leaf.id] for leaf in program.leaves}
        text, output = source(Case(program, contents))
        assert torch.equal(ran(text, output), program.execute(contents, backward=False).values[end]), text


def test_every_row_is_of_an_operator_of_the_table() -> None:
    """A row for one that no program may hold says nothing; and one without a row is written in full."""
    assert {name for name in ROWS if name not in FLOW} <= {"index_fill"}
    for name in set(FLOW) - set(ROWS):
        packet = getattr(torch.ops.aten, name)
        overloads = [one for one in packet.overloads() if not getattr(packet, one)._schema.is_mutable]
        assert overloads, name
    call = Call("aten.celu.default", (Ref(0),), (), (1,))
    assert generic(Asked.of(call, {0: Phrase("x")})).text == "torch.ops.aten.celu.default(x)"


def test_a_word_that_is_not_listed_is_an_error() -> None:
    """Strings of a file do not get into a script."""
    call = Call("aten.div.Tensor_mode", (Ref(0), 2), (("rounding_mode", '");evil("'),), (1,))
    with pytest.raises(ValueError, match="no operator"):
        idiom(Asked.of(call, {0: Phrase("x")}))
    assert replace(call, kwargs=()).kwargs == ()
