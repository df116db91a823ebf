"""Programs: what runs again, runs bit for bit; what comes out of a file can be nothing but arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import record
from torch import Tensor

import nanscope.program.cost as module
import nanscope.program.program as program_module
from nanscope.errors import ProgramError
from nanscope.program.calls import Call, Leaf, Ref, Site, overload, refs, substitute
from nanscope.program.program import Program, join
from nanscope.program.written import decode, encode
from nanscope.torch_inside import EVERY_DIVISION_STOPS

Args = tuple[Any, ...]


def chain(*calls: tuple[str, Args] | tuple[str, Args, dict[str, Any]], leaves: int = 1, diff: bool = True, grad: bool = True) -> Program:
    """A program of single-output calls: leaves have the first ids, every call makes the next one, the last is the output."""
    made = tuple(
        Call(op, args, tuple(sorted((more[0] if more else {}).items())), (leaves + i,), site=i % 2 - 1, grad=grad)
        for i, (op, args, *more) in enumerate(calls)
    )
    sites = (Site("/loss.py", 3, "loss", 4, 3, 9, "x", "x", "x.exp()", ("x",), ((3, "    x = x.exp()"),)), Site("<stdin>", 1, "<module>"))
    return Program(tuple(Leaf(i, f"leaf_{i}", "data", diff) for i in range(leaves)), made, leaves + len(calls) - 1, sites)


GRPO = chain(
    ("aten.sub.Tensor", (Ref(0), Ref(1)), {"alpha": 1}),
    ("aten.exp.default", (Ref(4),)),
    ("aten.clamp.default", (Ref(5), 0.8, 1.2)),
    ("aten.mul.Tensor", (Ref(5), Ref(2))),
    ("aten.mul.Tensor", (Ref(6), Ref(2))),
    ("aten.minimum.default", (Ref(7), Ref(8))),
    ("aten.neg.default", (Ref(9),)),
    ("aten.mul.Tensor", (Ref(10), Ref(3))),
    ("aten.sum.dim_IntList", (Ref(11), (-1,))),
    ("aten.sum.dim_IntList", (Ref(3), (-1,))),
    ("aten.clamp.default", (Ref(13), 1.0)),
    ("aten.div.Tensor", (Ref(12), Ref(14))),
    ("aten.mean.default", (Ref(15),)),
    leaves=4,
)


def grpo(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    per_token = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def batch(seed: int = 0, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> list[Tensor]:
    """Log-probs, old ones, advantages and a mask of four rows; `shift` makes one ratio overflow."""
    random = torch.Generator().manual_seed(seed)
    logps, old = (torch.randn(4, 9, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    advantages = torch.randn(4, 1, generator=random, dtype=torch.float64).to(dtype)
    mask = (torch.rand(4, 9, generator=random) > 0.3).to(dtype)
    old[1, 2] -= shift
    return [logps, old, advantages, mask]


# -- running ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 200.0])
def test_a_program_gives_what_eager_gives(dtype: torch.dtype, shift: float) -> None:
    """Loss and gradients, bit for bit, finite or not."""
    leaves = batch(3, dtype, shift)
    eager = [tensor.clone().requires_grad_() for tensor in leaves]
    loss = grpo(*eager)
    loss.backward()
    run = GRPO.execute(dict(enumerate(leaves)))
    assert same(run.values[GRPO.output], loss.detach())
    for index, tensor in enumerate(eager):
        assert tensor.grad is not None and same(run.grads[index], tensor.grad)


def test_the_leaves_are_left_alone() -> None:
    """Neither content, nor gradient, nor hooks of the given tensors change, and two runs are the same."""
    leaves = {i: tensor.requires_grad_() for i, tensor in enumerate(batch())}
    before = {i: tensor.detach().clone() for i, tensor in leaves.items()}
    first, second = GRPO.execute(leaves), GRPO.execute(leaves)
    for i, tensor in leaves.items():
        assert torch.equal(tensor, before[i]) and tensor.grad is None and not tensor._backward_hooks
        assert same(first.grads[i], second.grads[i])
    assert not any(value.requires_grad for value in first.values.values())


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["no_grad", "enable_grad", "autocast"]
)
def test_what_is_around_a_run_changes_nothing(around: Callable[[], Any]) -> None:
    """A program is run by hooks, in blocks of any kind: the casts that were recorded are the only ones."""
    program = chain(("aten.mm.default", (Ref(0), Ref(1))), ("aten.sum.default", (Ref(2),)), leaves=2)
    leaves = {0: torch.randn(3, 4), 1: torch.randn(4, 2)}
    wanted = program.execute(leaves)
    with around():
        got = program.execute(leaves)
    assert same(got.values[3], wanted.values[3]) and same(got.grads[0], wanted.grads[0])


def test_without_backward_there_are_no_gradients() -> None:
    """Forward only, on request."""
    run = GRPO.execute(dict(enumerate(batch())), backward=False)
    assert run.grads == {} and run.returned == {} and GRPO.output in run.values


def test_a_call_without_grad_cuts_the_graph() -> None:
    """What was computed under no_grad carries no gradient in a run either, nor does a leaf that had none."""
    program = chain(("aten.exp.default", (Ref(0),)), ("aten.mul.Tensor", (Ref(1), Ref(0))), ("aten.sum.default", (Ref(2),)))
    x = torch.tensor([0.5, 1.0])
    assert torch.equal(program.execute({0: x}).grads[0], x.exp() + x * x.exp())
    from dataclasses import replace

    cut = replace(program, calls=(replace(program.calls[0], grad=False), *program.calls[1:]))
    assert torch.equal(cut.execute({0: x}).grads[0], x.exp())
    assert chain(("aten.exp.default", (Ref(0),)), diff=False).execute({0: x}).grads == {}


def test_a_trace_holds_what_went_in_and_out_of_every_call() -> None:
    """Per call, the gradient of its result and those that its node returned, in the order in which backward visited them."""
    program = chain(("aten.exp.default", (Ref(0),)), ("aten.mul.Tensor", (Ref(2), Ref(1))), ("aten.sum.default", (Ref(3),)), leaves=2)
    x, y = torch.tensor([0.0, 200.0]), torch.tensor([1.0, 0.0])
    run = program.execute({0: x, 1: y}, trace=True)
    assert run.order == (2, 1, 0)
    (spread,) = run.returned[2]
    assert spread is not None and spread.tolist() == [1, 1] and run.grads[4].tolist() == 1
    returned = run.returned[0]
    assert run.grads[2].tolist() == [1, 0]
    assert returned[0] is not None and returned[0][0] == 1 and math.isnan(float(returned[0][1]))


@pytest.mark.parametrize("shift", [0.0, 200.0], ids=["finite", "overflows"])
def test_a_lean_run_keeps_what_a_walk_needs(shift: float) -> None:
    """Of an output that is not finite the values, and the gradients of the leaves; of one that is, everything."""
    x = torch.linspace(-1, 1, 6).add(shift).requires_grad_()
    made = record(lambda x: (torch.exp(x) * 2).sum(), x)
    lean, whole = (made.program.execute(made.tensors, trace=True, lean=lean) for lean in (True, False))
    assert set(lean.values) == set(whole.values)
    leaves = {leaf.id for leaf in made.program.leaves if leaf.diff}
    assert set(lean.grads) == (leaves if shift else set(whole.grads)) and leaves < set(whole.grads)
    assert all(lean.grads[value].equal(whole.grads[value]) or shift for value in lean.grads)
    assert len(lean.returned) == (0 if shift else len(whole.returned)) and whole.order


def test_calls_with_several_results() -> None:
    """A result that nobody reads has no id; the others have theirs."""
    program = Program(
        (Leaf(0, "x", "data", True),),
        (
            Call("aten.max.dim", (Ref(0), 1), (), (1, None)),
            Call("aten.split.Tensor", (Ref(0), 2, 1), (), (2, 3)),
            Call("aten.cat.default", ((Ref(3), Ref(2)), 1), (), (4,)),
            Call("aten.add.Tensor", (Ref(4), Ref(1)), (("alpha", 2),), (5,)),
            Call("aten.sum.default", (Ref(5),), (), (6,)),
        ),
        6,
    )
    x = torch.randn(4, 4)
    eager = x.clone().requires_grad_()
    low, high = eager.split(2, 1)
    loss = torch.add(torch.cat([high, low], 1), eager.max(1).values, alpha=2).sum()
    loss.backward()
    run = program.execute({0: x})
    assert eager.grad is not None and same(run.values[6], loss.detach()) and same(run.grads[0], eager.grad)


# -- another precision -----------------------------------------------------------------------------------------------------


def test_float64_means_everything_in_float64() -> None:
    """Floating leaves and recorded casts become float64, integers and bools stay what they are."""
    program = Program(
        (Leaf(0, "x", "data", True), Leaf(1, "ids", "data", False)),
        (
            Call("aten._to_copy.default", (Ref(0),), (("dtype", torch.float32),), (2,)),
            Call("aten._to_copy.default", (Ref(2),), (("dtype", torch.int64),), (3,)),
            Call("aten.mean.dim", (Ref(2), (0,)), (("dtype", torch.bfloat16),), (4,)),
            Call("aten.gt.Scalar", (Ref(2), 0), (), (5,)),
            Call("aten.full.default", ((2,), 1.0), (("device", torch.device("cpu")), ("dtype", torch.float16)), (6,)),
            Call("aten.add.Tensor", (Ref(4), Ref(6)), (("alpha", 1),), (7,)),
            Call("aten.sum.default", (Ref(7),), (), (8,)),
        ),
        8,
    )
    run = program.execute({0: torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 1: torch.tensor([1])}, dtype=torch.float64)
    kinds = {value: tensor.dtype for value, tensor in run.values.items()}
    assert kinds == {
        0: torch.float64, 1: torch.int64, 2: torch.float64, 3: torch.int64, 4: torch.float64, 5: torch.bool, 6: torch.float64,
        7: torch.float64, 8: torch.float64,
    }  # fmt: skip
    assert run.grads[0].dtype is torch.float64


def test_float64_finds_the_gradient_that_float32_rounds() -> None:
    """The reference for distortion: the same program, with more digits."""
    leaves = batch(5)
    wide = [tensor.double().requires_grad_() for tensor in leaves]
    loss = grpo(*wide)
    loss.backward()
    run = GRPO.execute(dict(enumerate(leaves)), dtype=torch.float64)
    assert same(run.values[GRPO.output], loss.detach())
    assert wide[0].grad is not None and same(run.grads[0], wide[0].grad)


@pytest.mark.parametrize(
    "call",
    [
        ("aten.zeros.default", ((3,),), {}),
        ("aten.ones.default", ((3,),), {"device": torch.device("cpu"), "pin_memory": False}),
        ("aten.full.default", ((3,), 0.0), {}),
        ("aten.arange.default", (3.0,), {}),
        ("aten.linspace.default", (0.0, 1.0, 3), {}),
    ],
    ids=lambda call: call[0],
)
def test_tensors_that_the_program_makes_are_float64_too(call: tuple[str, Args, dict[str, Any]]) -> None:
    """`out = torch.zeros(3)` was recorded without a dtype; in float64 it must take float64 elements."""
    program = Program(
        (Leaf(0, "x", "data", True), Leaf(1, "rows", "data", False)),
        (
            Call(call[0], call[1], tuple(sorted(call[2].items())), (2,)),
            Call("aten.index_put.default", (Ref(2), (Ref(1),), Ref(0)), (), (3,)),
            Call("aten.sum.default", (Ref(3),), (), (4,)),
        ),
        4,
    )
    leaves = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([0, 2])}
    assert program.execute(leaves).values[4].dtype is torch.float32
    run = program.execute(leaves, dtype=torch.float64)
    assert run.values[4].dtype is torch.float64 and run.grads[0].tolist() == [1, 1]


# -- slices ----------------------------------------------------------------------------------------------------------------


def test_a_slice_keeps_what_the_output_needs() -> None:
    """Calls, leaves and sites that nobody reads on the way to the output are dropped; the result is the same."""
    program = Program(
        (Leaf(0, "x", "data", True), Leaf(1, "unused", "data", True), Leaf(2, "late", "data", False)),
        (
            Call("aten.exp.default", (Ref(0),), (), (3,), site=2),
            Call("aten.log.default", (Ref(1),), (), (4,), site=0),
            Call("aten.max.dim", (Ref(0), 0), (), (5, 6), site=1),
            Call("aten.mul.Tensor", (Ref(3), Ref(5)), (), (7,), site=-1),
            Call("aten.add.Tensor", (Ref(7), Ref(2)), (), (8,), site=0),
            Call("aten.sum.default", (Ref(7),), (), (9,), site=9),
        ),
        9,
        tuple(Site("f.py", line, "f") for line in (10, 11, 12)),
    )
    part = program.slice()
    assert [call.op for call in part.calls] == ["aten.exp.default", "aten.max.dim", "aten.mul.Tensor", "aten.sum.default"]
    assert [leaf.name for leaf in part.leaves] == ["x"]
    assert [(site := part.site_of(call)) and site.line for call in part.calls] == [12, 11, None, None]
    assert part.slice() == part
    x = torch.randn(3, 2)
    assert same(part.execute({0: x}).values[9], program.execute({0: x, 1: x, 2: x}).values[9])
    inner = program.slice(4)
    assert [call.op for call in inner.calls] == ["aten.log.default"] and inner.output == 4 and [leaf.id for leaf in inner.leaves] == [1]


def test_a_program_knows_its_values() -> None:
    """Who makes a value, who reads it, and which ids are free."""
    assert GRPO.producers.get(5) == 1 and GRPO.producers.get(0) is None
    assert GRPO.consumers[2] == [3, 4] and GRPO.consumers[3] == [7, 9]
    assert GRPO.new_id() == 17 and Program((), (), -1).new_id() == 0
    leaf = GRPO.leaf(1)
    assert leaf is not None and leaf.name == "leaf_1" and GRPO.leaf(5) is None
    twice = Call("aten.mul.Tensor", (Ref(1), Ref(1)), (("other", (Ref(2), (Ref(3), None))),), (4,))
    assert list(twice.inputs()) == [1, 1, 2, 3]
    assert substitute((Ref(1), (Ref(2), 1.5)), {1: 7}) == (Ref(7), (Ref(2), 1.5)) and list(refs(None)) == []


def test_memory_that_nobody_wrote_keeps_its_line() -> None:
    """Through a slice, two programs that become one, and a file; a leaf without a line is written as it was before there were any."""
    sites = (Site("a.py", 1, "f"), Site("b.py", 2, "g"), Site("c.py", 3, "h"))
    leaves = (Leaf(0, "x", "data", True), Leaf(1, "rows", "data", False, "empty", site=2))
    calls = (Call("aten.exp.default", (Ref(0),), (), (2,), site=0), Call("aten.mul.Tensor", (Ref(0), Ref(1)), (), (3,), site=1))
    part = Program(leaves, calls, 3, sites).slice()
    other = Program((Leaf(3, "y", "data", False),), (Call("aten.sum.default", (Ref(3),), (), (4,), site=0),), 4, sites[:1])
    for program in (part, join([part, other]), join([other, part]), Program.from_json(part.to_json())):
        made = program.made_at(program.leaf(1))
        assert made is not None and made.line == 3
        assert program.made_at(program.leaf(0)) is None
    assert [len(leaf) for leaf in part.to_json()["leaves"]] == [6, 7]


def test_two_programs_become_one() -> None:
    """A leaf of the second that the first makes is no leaf any more; every call keeps its position in the source."""
    first = Program((Leaf(0, "x", "data", True),), (Call("aten.exp.default", (Ref(0),), (), (1,), site=0),), 1, (Site("a.py", 1, "f"),))
    second = Program((Leaf(1, "y", "module", True),), (Call("aten.sum.default", (Ref(1),), (), (2,), site=0),), 2, (Site("b.py", 2, "g"),))
    whole = join([first, second])
    assert [leaf.id for leaf in whole.leaves] == [0] and whole.output == 2
    assert [(site := whole.site_of(call)) and site.file for call in whole.calls] == ["a.py", "b.py"]
    assert float(whole.execute({0: torch.zeros(3)}).values[2]) == 3


# -- through JSON ----------------------------------------------------------------------------------------------------------

ARGS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.builds(Ref, st.integers(0, 99)),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]),
        st.sampled_from([torch.device("cpu"), torch.strided, torch.contiguous_format, torch.preserve_format, torch.channels_last]),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)  # fmt: skip


def identical(a: Any, b: Any) -> bool:
    """Equal in value and type, where NaN is NaN and −0 is not 0."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b


@given(ARGS)
def test_an_argument_survives_strict_json(arg: Any) -> None:
    """Numbers that JSON does not have, dtypes, layouts, memory formats and references included."""
    assert identical(decode(json.loads(json.dumps(encode(arg), allow_nan=False))), arg)


@given(
    st.lists(st.tuples(st.lists(ARGS, max_size=3).map(tuple), st.dictionaries(st.sampled_from("abc"), ARGS, max_size=2)), max_size=3),
    st.data(),
)
def test_a_program_survives_strict_json(calls: list[tuple[Args, dict[str, Any]]], data: st.DataObject) -> None:
    """Leaves, calls, results that nobody reads, sites with their source: all of it comes back."""
    text = st.none() | st.text(max_size=6)
    made = tuple(
        Call("aten.exp.default", args, tuple(sorted(kwargs.items())), (100 + i, None), site=i - 1, grad=i % 2 == 0, module="lm_head")
        for i, (args, kwargs) in enumerate(calls)
    )
    leaves = tuple(Leaf(i, data.draw(text) if i == 3 else None, "module", True, "Qwen2ForCausalLM") for i in range(100))
    site = Site("a.py", 3, "f", 1, 4, 2, data.draw(text), data.draw(text), "e", ("x", "y"), ((2, "def f():"), (3, "\tπ = 3 # <b>")))
    program = Program(leaves, made, 5, (site, Site("b.py", 1, "g")))
    back = Program.from_json(json.loads(json.dumps(program.to_json(), allow_nan=False, sort_keys=True)))
    assert (back.leaves, back.output, back.sites) == (program.leaves, program.output, program.sites)
    for mine, theirs in zip(back.calls, made, strict=True):
        assert (mine.op, mine.outs, mine.site, mine.grad, mine.module) == (theirs.op, theirs.outs, theirs.site, theirs.grad, theirs.module)
        assert identical(mine.args, theirs.args)
        assert [name for name, _ in mine.kwargs] == [name for name, _ in theirs.kwargs]
        assert all(identical(a, b) for (_, a), (_, b) in zip(mine.kwargs, theirs.kwargs, strict=True))


def test_a_recorded_device_is_read_as_the_cpu() -> None:
    """A step of a GPU is replayed where it is read."""
    assert decode(json.loads(json.dumps(encode(torch.device("cuda:3"))))) == torch.device("cpu")


def test_a_run_from_json_is_the_same_run() -> None:
    """What a file says is what was recorded."""
    leaves = dict(enumerate(batch(7, shift=200.0)))
    back = Program.from_json(json.loads(json.dumps(GRPO.to_json())))
    assert back == GRPO
    assert same(back.execute(leaves).grads[0], GRPO.execute(leaves).grads[0])


@pytest.mark.parametrize(
    "data",
    [
        None, 3, "text", [], {}, {"leaves": [], "calls": [], "sites": []}, {"leaves": 3, "calls": [], "sites": [], "output": 0},
        {"leaves": [[0]], "calls": [], "sites": [], "output": 0}, {"leaves": [], "calls": [[]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [], [], [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [], {}, [], -1, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.zeros.default", [2], {}, [0], 1, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.zeros.default", [2], {}, [0], -2, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"object": "os"}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"dtype": "load"}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"dtype": "os.system"}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"float": "1.5"}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"float": []}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", [{"v": math.inf}], {}, [0], 0, True, ""]], "sites": [], "output": 0},
        {"leaves": [], "calls": [], "sites": [], "output": math.inf}, {"leaves": [], "calls": [], "sites": [[1]], "output": 0},
        {"leaves": [], "calls": [["aten.exp.default", json.loads("[" * 900 + "]" * 900), {}, [0], 0, True, ""]], "sites": [], "output": 0},
    ],
    ids=lambda data: str(data)[:60],
)  # fmt: skip
def test_what_is_no_program_is_one_clear_error(data: Any) -> None:
    """Every damage is a ProgramError with one line."""
    with pytest.raises(ProgramError, match="not readable") as caught:
        Program.from_json(data)
    assert caught.value.slug == "program-unreadable" and "\n" not in str(caught.value)


# -- nothing but arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        "aten.exp_.default", "aten.exp.out", "aten.add.out", "aten.copy_.default", "aten.bernoulli.default", "aten.rand.default",
        "aten.empty.memory_format", "aten.set_.source_Tensor", "aten.from_file.default", "aten.resize_.default", "aten._to_copy.out",
        "prims.exp.default", "torch.load", "os.system", "aten.exp", "exp", "", "aten..", "aten.exp.", "aten.exp.default.x", "aten.exp.nothing",
        "aten.exp.default\n", " aten.exp.default", "aten.exp.overloads", "aten.exp.op", "aten.exp.__class__", "aten.exp.__init__", "aten.exp.__doc__",
        "aten.exp._schemas", "aten.exp._qualified_op_name", "aten.__class__.default", "aten.__getattr__.default", "ATEN.exp.default",
        "aten.exp.default()", "aten.еxp.default",
    ],
)  # fmt: skip
def test_an_operator_outside_the_whitelist_is_never_reached(op: str) -> None:
    """Writing, random, unknown, misspelled, or not an operator at all: one ProgramError, before anything runs."""
    with pytest.raises(ProgramError) as caught:
        overload(op)
    assert caught.value.slug == "program-unknown-op"
    with pytest.raises(ProgramError):
        Program((Leaf(0, "x", "data", False),), (Call(op, (Ref(0),), (), (1,)),), 1).execute({0: torch.ones(2)})


def test_a_missing_leaf_is_named() -> None:
    """By id and by what the code calls it."""
    with pytest.raises(ProgramError, match=r"leaf 3 \(leaf_3\) is missing") as caught:
        GRPO.execute(dict(enumerate(batch()[:3])))
    assert caught.value.slug == "program-missing-leaf"


@pytest.mark.parametrize(
    ("program", "slug"),
    [
        (chain(("aten.exp.default", (Ref(7),))), "program-missing-value"),
        (chain(("aten.exp.default", (Ref(1),))), "program-missing-value"),
        (Program((Leaf(0, "x", "data", True),), (), 5), "program-missing-value"),
        (Program((Leaf(0, "x", "data", True),), (Call("aten.exp.default", (Ref(0),), (), (None,)),), 1), "program-missing-value"),
        (chain(("aten.exp.default", ())), "program-call-failed"),
        (chain(("aten.exp.default", (Ref(0), 3))), "program-call-failed"),
        (chain(("aten.exp.default", ("text",))), "program-call-failed"),
        (chain(("aten.exp.default", (Ref(0),), {"nothing": 1})), "program-call-failed"),
        (chain(("aten.mm.default", (Ref(0), Ref(0)))), "program-call-failed"),
        (chain(("aten.select.int", (Ref(0), 0, 99))), "program-call-failed"),
        (chain(("aten.select.int", (Ref(0), 0, 10**30))), "program-call-failed"),
        (chain(("aten.add.Tensor", (Ref(0), 10**400))), "program-call-failed"),
        (chain(("aten.view.default", (Ref(0), (7, 7)))), "program-call-failed"),
        (chain(("aten.as_strided.default", (Ref(0), (100,), (1,)))), "program-call-failed"),
        (chain(("aten.index.Tensor", (Ref(0), ()))), "program-call-failed"),
        (chain(("aten.heaviside.default", (Ref(0), Ref(0))), ("aten.sum.default", (Ref(1),))), "program-backward-failed"),  # has no derivative
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_made_is_one_clear_error(program: Program, slug: str) -> None:
    """Values that do not exist, arguments that do not fit, derivatives that torch does not have: a ProgramError that names the call."""
    with pytest.raises(ProgramError) as caught:
        program.execute({0: torch.randn(3, 4)})
    assert caught.value.slug == slug and "\n" not in str(caught.value)


@pytest.mark.parametrize("op", ["aten.copy.default", "aten.as_strided_scatter.default"])
def test_what_torch_cannot_differentiate_rightly_is_not_in_the_table(op: str) -> None:
    """torch has no derivative for the one and a wrong one for the other: writes are recorded as something else."""
    with pytest.raises(ProgramError) as caught:
        overload(op)
    assert caught.value.slug == "program-unknown-op"


LEAST = -(1 << 63)


@pytest.mark.parametrize(
    "call",
    [
        ("aten._reshape_alias.default", (Ref(0), (4096,), (1,))),
        ("aten._reshape_alias.default", (Ref(0), (4,), (1 << 30,))),
        ("aten._reshape_alias.default", (Ref(0), (4,), (-1,))),
        ("aten._reshape_alias.default", (Ref(0), (1 << 40,), (0,))),
        ("aten._reshape_alias.default", (Ref(0), (4,), (1, 1))),
        ("aten.median.dim", (Ref(1), 0)),
        ("aten.nanmedian.dim", (Ref(1), -2)),
        ("aten.div.Tensor_mode", (Ref(2), Ref(3)), {"rounding_mode": "trunc"}),
        ("aten.div.Scalar_mode", (Ref(2), -1), {"rounding_mode": "trunc"}),
        ("aten.polygamma.default", (2, Ref(4))),
        ("aten.polygamma.default", (1, Ref(4))),  # its derivative is the second order
        ("aten._to_copy.default", (Ref(0),), {"dtype": torch.quint8}),
        ("aten.view.dtype", (Ref(0), torch.bits8)),
        ("aten.view.dtype", (Ref(0), 12)),  # the number of a dtype
        ("aten.zeros.default", ((4,),), {"dtype": torch.int2}),
        ("aten.zeros.default", ((4,),), {"layout": torch.sparse_coo}),
        ("aten.zeros.default", ((4,),), {"layout": 7}),
        ("aten.zeros.default", ((4,),), {"device": "meta"}),
        ("aten.clone.default", (Ref(0),), {"memory_format": 1}),
        ("aten.as_strided.default", (Ref(0), (-1, 0), (1, 1))),
    ],
    ids=str,
)
def test_no_call_reaches_outside_of_its_tensors(call: Any) -> None:
    """What torch does not check by itself is checked before: a file reads no memory, stops no process, and never hangs."""
    with pytest.raises(ProgramError) as caught:
        chain(call, leaves=5, diff=False).execute(
            {
                0: torch.ones(4),
                1: torch.ones(1, 3).expand(5, 3),
                2: torch.tensor([LEAST, 1]),
                3: torch.tensor([-1, 1]),
                4: torch.tensor([0.5, -1e9]),
            }
        )
    assert caught.value.slug == "program-call-unsafe" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        ("aten._reshape_alias.default", (Ref(0), (2, 2), (2, 1))),
        ("aten._reshape_alias.default", (Ref(0), (1, 4), (4, 1))),
        ("aten._reshape_alias.default", (Ref(1), (15,), (0,))),
        ("aten.median.dim", (Ref(1), 1)),
        ("aten.div.Tensor_mode", (Ref(3), Ref(3)), {"rounding_mode": "floor"}),
        ("aten.div.Tensor_mode", (Ref(3), Ref(3)), {"rounding_mode": "trunc"}),
        ("aten.div.Tensor", (Ref(2), Ref(3))),
        ("aten.remainder.Tensor", (Ref(3), Ref(3))),
        ("aten.polygamma.default", (1, Ref(0))),
        ("aten._to_copy.default", (Ref(0),), {"dtype": torch.float8_e5m2, "layout": torch.strided, "device": torch.device("cpu")}),
        ("aten.clone.default", (Ref(0),), {"memory_format": torch.preserve_format}),
    ],
    ids=str,
)
def test_what_a_loss_does_with_them_is_no_attack(call: Any) -> None:
    """The same operators on what they are made for."""
    tensors = {0: torch.ones(4), 1: torch.ones(1, 3).expand(5, 3), 2: torch.tensor([LEAST, 1]), 3: torch.tensor([-1, 1])}
    replace(chain(call, leaves=4, diff=False), foreign=True, output=0).execute(tensors)


@pytest.mark.parametrize(
    "call",
    [
        ("aten.div.Tensor_mode", (Ref(1), Ref(2)), {"rounding_mode": "floor"}),
        ("aten.div.Scalar_mode", (Ref(1), -1), {"rounding_mode": "floor"}),
        ("aten.floor_divide.default", (Ref(1), Ref(2))),
        ("aten.remainder.Tensor", (Ref(1), Ref(2))),
        ("aten.remainder.Scalar", (Ref(1), -1)),
        ("aten.fmod.Tensor", (Ref(1), Ref(2))),
    ],
    ids=str,
)
def test_what_stops_the_process_in_an_older_torch_is_refused_there(call: Any) -> None:
    """The least integer is divided where torch sees to it, and refused where the processor would."""
    tensors = {0: torch.ones(4), 1: torch.tensor([LEAST, 1]), 2: torch.tensor([-1, 1])}
    program = replace(chain(call, leaves=3, diff=False), foreign=True, output=0)
    if not EVERY_DIVISION_STOPS:
        program.execute(tensors)
        return
    with pytest.raises(ProgramError) as caught:
        program.execute(tensors)
    assert caught.value.slug == "program-call-unsafe"


@pytest.mark.parametrize("op", ["aten.remainder.int", "aten.add.str", "aten.slice.str", "aten.pow.int_to_int", "aten.to.prim_dtype"])
def test_what_is_no_operator_on_tensors_is_refused(op: str) -> None:
    """torch keeps functions of TorchScript under the same names: 1 % 0 of one of them stops the process."""
    with pytest.raises(ProgramError) as caught:
        overload(op)
    assert caught.value.slug == "program-unknown-op"


BIG = 1 << 20


@pytest.mark.parametrize(
    "call",
    [
        ("aten.full.default", ((BIG, BIG), 1.0)),
        ("aten.zeros.default", ((BIG * BIG,),)),
        ("aten.new_zeros.default", (Ref(0), (BIG, BIG))),
        ("aten.expand.default", (Ref(1), (BIG, BIG))),
        ("aten.repeat.default", (Ref(0), (BIG, BIG))),
        ("aten.tile.default", (Ref(0), (BIG, BIG))),
        ("aten.constant_pad_nd.default", (Ref(0), (BIG * BIG, 0))),
        ("aten.constant_pad_nd.default", (Ref(0), (BIG * 4096, -1))),
        ("aten.arange.default", (1e15,)),
        ("aten.arange.start", (-1e15, 0)),
        ("aten.arange.start_step", (0, 1, 1e-15)),
        ("aten.linspace.default", (0, 1, BIG * BIG)),
        ("aten.logspace.default", (0, 1, BIG * BIG)),
        ("aten.eye.default", (BIG * BIG,)),
        ("aten.eye.default", (BIG,)),
        ("aten.eye.m", (BIG, BIG)),
        ("aten.repeat_interleave.self_int", (Ref(0), BIG * BIG)),
        ("aten.one_hot.default", (Ref(2), BIG * BIG)),
        ("aten.full.default", ((2, BIG, BIG), 0)),
        # little comes out, much is made on the way
        ("aten.mvlgamma.default", (Ref(0), 10**8)),
        ("aten.bincount.default", (Ref(3),)),
        ("aten.bincount.default", (Ref(2), None, BIG * BIG)),
        ("aten.one_hot.default", (Ref(3),)),
        ("aten.repeat_interleave.Tensor", (Ref(3),)),
        ("aten.repeat_interleave.self_Tensor", (Ref(0), Ref(3))),
        ("aten.histc.default", (Ref(0), BIG * 4096)),
        ("aten.sum.default", (Ref(4),)),
        ("aten.all.default", (Ref(4),)),
        ("aten.unbind.int", (Ref(4),)),
        ("aten.split.Tensor", (Ref(4), 1)),
        ("aten.chunk.default", (Ref(5), BIG * BIG)),
        ("aten.diff.default", (Ref(6), 10**9)),
        ("aten.masked_select.default", (Ref(7), Ref(8))),
        ("aten.index.Tensor", (Ref(9), (Ref(8), Ref(10)))),
        ("aten.index_put.default", (Ref(11), (Ref(10), Ref(12)), Ref(1), True)),
        ("aten.roll.default", (Ref(6), (1,) * 5000, (0,) * 5000)),
        ("aten.convolution.default", (Ref(13), Ref(13), None, (BIG,), (BIG * 64,), (1,), False, (0,), 1)),
        ("aten.mm.default", (Ref(14), Ref(15))),
        ("aten.cdist.default", (Ref(7), Ref(7), 1.0)),
    ],
    ids=lambda call: f"{call[0]}{call[1]}",
)
def test_a_hostile_program_cannot_ask_for_all_memory(call: tuple[str, Args]) -> None:
    """Sizes that no step has are refused before anything is allocated."""
    indices, wide = torch.zeros(9000, dtype=torch.int64), torch.ones(1, 1)
    tensors = {
        0: torch.ones(2),
        1: wide,
        2: torch.tensor([0, 1]),
        3: torch.tensor([BIG * BIG, 1]),
        4: torch.ones(1).expand(BIG * BIG),
        5: torch.ones(0),
        6: torch.ones(9000),
        7: torch.ones(9000, 1),
        8: torch.ones(9000, dtype=torch.bool),
        9: torch.ones(9000, 1),
        10: indices.view(-1, 1),
        11: torch.ones(1, 1),
        12: indices,
        13: torch.ones(1, 1, 1),
        14: wide.expand(2000, 1 << 20),
        15: wide.expand(1 << 20, 2000),
    }
    leaves = tuple(Leaf(i, "x", "data", False) for i in tensors)
    with pytest.raises(ProgramError) as caught:
        Program(leaves, (Call(call[0], call[1], (), (99,)),), 99, foreign=True).execute(tensors)
    assert caught.value.slug == "program-too-large"


@pytest.mark.parametrize(
    "calls",
    [
        [("aten.view.default", (Ref(0), (-1, 1))), ("aten.mul.Tensor", (Ref(1), Ref(0)))],
        [("aten.view.default", (Ref(0), (-1, 1))), ("aten.view.default", (Ref(0), (1, -1))), ("aten.mm.default", (Ref(1), Ref(2)))],
        [("aten.exp.default", (Ref(0),))] * 70,
        [("aten.cat.default", ((Ref(0),) * 70,))],
        [
            ("aten.expand.default", (Ref(0), (9, 100))),
            ("aten.unsqueeze.default", (Ref(1), 0)),
            ("aten.expand.default", (Ref(2), (9, -1, -1))),
        ],
        [("aten.repeat.default", (Ref(0), (10,))), ("aten.repeat.default", (Ref(1), (10,)))],
    ],
    ids=["outer product", "matmul", "many small ones", "cat", "expanding twice", "repeating twice"],
)
def test_sizes_that_multiply_are_bounded_too(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Args]]) -> None:
    """No call asks for much, all of them together do: what a program makes is bounded as a whole."""
    for name, value in {"SMALL": 10, "SHARE": 3, "EACH": 1}.items():
        monkeypatch.setattr(module, name, value)
    program = chain(*calls, diff=False)
    with pytest.raises(ProgramError) as caught:
        replace(program, foreign=True).execute({0: torch.ones(100)})
    assert caught.value.slug == "program-too-large"
    program.execute({0: torch.ones(100)})  # what this process recorded itself is not bounded
    monkeypatch.setenv("NANSCOPE_LARGE_FILES", "1")
    replace(program, foreign=True).execute({0: torch.ones(100)})


def test_a_file_has_no_more_calls_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes little, and all of them the stack of torch's backward: they are counted before anything runs."""
    data = chain(*[("aten.mul.Tensor", (Ref(0), 1.0))] * 4).to_json()
    monkeypatch.setattr(program_module, "MOST", 3)
    with pytest.raises(ProgramError, match="has 4 calls") as caught:
        Program.from_json(data)
    assert caught.value.slug == "program-too-large"
    monkeypatch.setenv("NANSCOPE_LARGE_FILES", "1")
    assert len(Program.from_json(data).calls) == 4


def test_sizes_of_a_real_step_are_fine() -> None:
    """Paddings, permutations and shapes with zeros in them are no attack."""
    for op, args in (
        ("aten.permute.default", (Ref(0), (1, 0))),
        ("aten.constant_pad_nd.default", (Ref(0), (0, 3, 0, 0))),
        ("aten.zeros.default", ((0, 4096, 50_000),)),
        ("aten.sum.dim_IntList", (Ref(0), (0, 1))),
        ("aten.slice.Tensor", (Ref(0), 0, 0, 9223372036854775807)),
        ("aten.clamp.default", (Ref(0), -1e38, 1e38)),
        ("aten.full_like.default", (Ref(0), -3e38)),
        ("aten.arange.default", (5,)),
    ):
        program = Program((Leaf(0, "x", "data", False),), (Call(op, args, (), (1,)),), 1)
        program.execute({0: torch.ones(2, 3)})


@pytest.mark.parametrize("op", ["aten.isnan.default", "aten.argmax.default"])
def test_a_file_whose_program_ends_in_no_numbers_is_refused(op: str) -> None:
    """What is asked of a loss or of an update, how large it is and whether it is finite, cannot be asked of a truth value."""
    program = Program((Leaf(0, "x", "data", False),), (Call(op, (Ref(0),), (), (1,)),), 1)
    assert program.execute({0: torch.ones(3)}).values[1].dtype in (torch.bool, torch.int64)  # of what was recorded here
    with pytest.raises(ProgramError) as caught:
        replace(program, foreign=True).execute({0: torch.ones(3)})
    assert caught.value.slug == "program-output"


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([["aten.neg.default", [{"v": 1}], {}, [1], 0, True, ""]], "reads value 1 before it is made"),
        ([["aten.neg.default", [{"v": 0}], {}, [0], 0, True, ""]], "makes value 0 twice"),
        ([["aten.neg.default", [{"v": 0}], {}, [1], 0, True, ""], ["aten.neg.default", [{"v": 1}], {}, [1], 0, True, ""]], "1 twice"),
        ([["aten.aminmax.default", [{"v": 0}], {}, [1, 1], 0, True, ""]], "makes value 1 twice"),
    ],
)
def test_a_program_from_a_file_goes_one_way(calls: list[Any], why: str) -> None:
    """What reads its own result, or makes a value a second time, would be followed back for ever."""
    with pytest.raises(ProgramError, match=why):
        Program.from_json({"leaves": [[0, "x", "data", True, "", ""]], "calls": calls, "output": 1, "sites": []})
