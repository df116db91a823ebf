"""The operator table: what is in it exists, is functional, and draws no random numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nanscope.program.ops as ops
from nanscope.errors import ProgramError
from nanscope.program.calls import Call, Ref, overload
from nanscope.program.ops import ATTENTIONS, DIVISIONS, FLOW, PAYLOAD, SELECTORS, Flow, base_name, flow_of
from nanscope.program.safety import permitted

ROOT = Path(ops.__file__).parents[1]

RANDOM = (
    "bernoulli", "rand", "normal", "multinomial", "dropout", "poisson", "binomial", "uniform", "exponential", "geometric", "cauchy", "gumbel",
    "rrelu", "shuffle", "random", "sample", "empty", "log_normal", "gamma", "dirichlet",
)  # fmt: skip
NOT_RANDOM = frozenset(("digamma", "lgamma", "mvlgamma", "polygamma"))


def overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload_name) for overload_name in packet.overloads()]


@pytest.mark.parametrize("name", sorted(FLOW))
def test_an_operator_of_the_table_exists(name: str) -> None:
    """A row that names no operator guards nothing and hides a spelling mistake."""
    assert hasattr(torch.ops.aten, name), f"torch {torch.__version__} has no aten.{name}"
    assert any(not overload._schema.is_mutable for overload in overloads(name)), f"aten.{name} has no functional overload"


@pytest.mark.parametrize("name", sorted(FLOW))
def test_only_functional_overloads_can_be_reached(name: str) -> None:
    """A name from a file reaches an overload only if its schema writes to no argument."""
    for found in overloads(name):
        op = f"aten.{name}.{found._overloadname}"
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in found._schema.arguments)
        assert writes == found._schema.is_mutable
        if found._schema.is_mutable or not torch._C._dispatch_has_kernel(found.name()):  # TorchScript's own, on numbers and strings
            with pytest.raises(ProgramError):
                overload(op)
        else:
            assert overload(op) is found


def test_no_operator_draws_random_numbers_or_leaves_memory_unwritten() -> None:
    """Replaying must give the same bits: no generator, no uninitialised memory."""
    suspicious = [name for name in FLOW if any(word in name for word in RANDOM) and name not in NOT_RANDOM]
    assert suspicious == []
    for name in set(FLOW) - ATTENTIONS:
        for found in overloads(name):
            assert torch.Tag.nondeterministic_seeded not in found.tags, f"{found} draws random numbers"
            if not found._schema.is_mutable:
                assert not any("Generator" in str(argument.type) for argument in found._schema.arguments), f"{found} takes a generator"


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_attention_draws_nothing(name: str) -> None:
    """The only operators of the table that could drop something out are refused where they would."""
    with pytest.raises(ProgramError, match="drops out"):
        permitted(f"aten.{name}.default", [torch.ones(1, 1, 2, 4)] * 3, {"dropout_p": 0.5})


def test_no_operator_is_in_place_by_name() -> None:
    """In-place operators are recorded in their functional form."""
    assert [name for name in FLOW if name.endswith("_")] == []


def test_each_operator_has_one_row() -> None:
    """An operator that stands in two rows would flow as the later one says."""
    from nanscope.program.ops import _TABLE

    names = [name for row in _TABLE.values() for name in row.split()]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_the_other_tables_speak_of_rows_that_exist() -> None:
    """Payloads belong to copying operators, selectors to known ones."""
    assert {name for name in PAYLOAD if FLOW.get(name) is not Flow.MOVE} == set()
    assert set(SELECTORS) - set(FLOW) == set()


@pytest.mark.parametrize("name", sorted(PAYLOAD))
def test_a_payload_position_takes_elements(name: str) -> None:
    """The positions in the payload table are tensors (or the number that stands for one) in at least one overload."""
    for position in PAYLOAD[name]:
        types = {
            str(found._schema.arguments[position].type)
            for found in overloads(name)
            if not found._schema.is_mutable and position < len(found._schema.arguments)
        }
        assert types & {"Tensor", "List[Tensor]", "number"}, (name, position, types)


def test_a_selector_gives_no_floating_numbers() -> None:
    """What says "which" gives bools or integers, so it can carry no NaN forward."""
    x, y = torch.tensor([[1.5, -2.0], [0.25, 4.0]]), torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    other = {"one_hot": (torch.tensor([0, 1]),), "searchsorted": (x[0], y), "bucketize": (x, y[0])}
    other |= dict.fromkeys(("bitwise_not", "_is_any_true", "_is_all_true"), (x.bool(),))
    binary = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "equal")
    for name in SELECTORS:
        args = other.get(name, (x, y) if name in binary else (x,))
        result = getattr(torch.ops.aten, name)(*args)
        assert isinstance(result, bool) or not result.is_floating_point(), name


@pytest.mark.parametrize(
    ("op", "base", "flow"),
    [
        ("aten.exp.default", "exp", Flow.POINTWISE),
        ("aten.sum.dim_IntList", "sum", Flow.REDUCE),
        ("exp", "exp", Flow.POINTWISE),
        ("aten._log_softmax.default", "_log_softmax", Flow.ALONG),
        ("aten.view.default", "view", Flow.MOVE),
        ("aten.mm.default", "mm", Flow.MATMUL),
        ("aten.bernoulli.default", "bernoulli", None),
    ],
)
def test_an_overload_belongs_to_its_base_name(op: str, base: str, flow: Flow | None) -> None:
    """The table is looked up by the bare operator name."""
    assert base_name(op) == base
    assert flow_of(op) is flow


def test_a_call_knows_its_bare_name() -> None:
    """And keeps it out of what it is: two calls are equal by operator and arguments."""
    call = Call("aten.clamp.Tensor", (Ref(0),), (), (1,))
    assert call.name == "clamp" and call == Call("aten.clamp.Tensor", (Ref(0),), (), (1,))
    assert "name" not in Call.__slots__


SEEN_BY_THE_TAPE = (
    "UNWRITTEN_FACTORIES",
    "DATA_FACTORIES",
    "GRADIENT_NORMS",
    "SILENT",
    "OVERWRITES",
    "MADE_OF_PRODUCTS",
    "BATCH_NORMS",
    "MASK_FREE",
    "WEIGHT_NORMS",
    "NORMALISATIONS",
)
FAMILIES = {name: family for name, family in vars(ops).items() if name.isupper() and isinstance(family, frozenset)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_speaks_of_operators_that_exist(name: str) -> None:
    """A name that no program may hold decides nothing."""
    unseen = {op for op in FAMILIES[name] - set(FLOW) if not hasattr(torch.ops.aten, op)}
    assert FAMILIES[name] and unseen == set()
    assert name in SEEN_BY_THE_TAPE or FAMILIES[name] <= set(FLOW)


def test_the_divisor_is_an_argument() -> None:
    """Where it stands is what the operator's own schema calls it."""
    assert set(DIVISIONS) <= set(FLOW)
    for name, position in DIVISIONS.items():
        found = getattr(torch.ops.aten, name)
        schema = getattr(found, found.overloads()[0])._schema
        assert schema.arguments[position].name in ("other", "tensor2", "self"), name


KNOWN = set(FLOW).union(*FAMILIES.values())


def listed(source: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line and the names of every tuple, list or set of operators that a source writes down."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) > 1:
            names = tuple(item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str))
            if len(names) == len(node.elts) and all(name in KNOWN for name in names):
                yield node.lineno, names


SPELLING = {
    ROOT / name for name in ("program/spelling.py", "replay/handwriting.py", "replay/statement.py", "reproduce/idioms.py")
}  # how a source writes each of them
OTHERS = [
    path for path in sorted(ROOT.rglob("*.py")) if path != Path(ops.__file__) and path.parent.name != "frameworks" and path not in SPELLING
]


@pytest.mark.parametrize("path", OTHERS, ids=[str(path.relative_to(ROOT)) for path in OTHERS])
def test_operators_are_listed_in_one_place(path: Path) -> None:
    """A second list of the same operators forgets what the first one learns: families stand in program/ops.py alone."""
    assert list(listed(path.read_text(encoding="utf-8"))) == []


def test_the_reader_of_lists_sees_them_all() -> None:
    """Wherever a list hides; one name is a name, and other words are none of its business."""
    source = "A = frozenset((\"exp\", \"log\"))\nif x in {'add', 'sub'}: pass\ny = ['mul', 'div']\nz = ('exp',), ('loss', 'exp')\n"
    assert [names for _, names in sorted(listed(source))] == [("exp", "log"), ("add", "sub"), ("mul", "div")]
