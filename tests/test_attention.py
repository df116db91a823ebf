"""Fused attention is a call of a program like any other: it runs again to the bit, is gone back through, and does no harm in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.errors import ProgramError
from nanscope.program.attention import HERE, attended
from nanscope.program.calls import Call, Ref
from nanscope.program.flow import sources, spread
from nanscope.program.ops import ATTENTIONS
from nanscope.program.perform import perform
from nanscope.program.safety import permitted

BEFORE_BIAS = f"_{HERE.removeprefix('_').removesuffix('_for_cpu')}", HERE  # these take no bias among their arguments


def call_of(name: str, bias: bool = False, causal: bool = False) -> Call:
    given: tuple[Any, ...] = (Ref(0), Ref(1), Ref(2))
    if name not in BEFORE_BIAS:
        given += (Ref(3) if bias else None, True)
    kwargs = (("attn_mask", Ref(3)),) if bias and name == HERE else ()
    return Call(f"aten.{name}.default", (*given, 0.0, causal), kwargs, (4, 5), -1, True)


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_the_kernel_of_any_device_runs_here(name: str, causal: bool, shared: int) -> None:
    query, key, value = heads(2, 4, 5, 8), heads(2, 4 // shared, 5, 8), heads(2, 4 // shared, 5, 8)
    made = perform(call_of(name, causal=causal), {0: query, 1: key, 2: value}, None, torch.device("cpu"), True)
    meant = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shared > 1)
    assert torch.allclose(made[0], meant, atol=1e-6)
    assert len(made) == 2
    found = torch.autograd.grad(made[0].square().sum(), (query, key, value))
    wanted = torch.autograd.grad(meant.square().sum(), (query, key, value))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_the_formula_takes_the_bias_by_either_name() -> None:
    query, bias = heads(1, 1, 3, 4), torch.tensor([[0.0, -1e9, -1e9]])
    one = attended({"query": query, "key": query, "value": query, "attn_bias": bias.expand(1, 1, 3, 3)}, 1)[0]
    other = attended({"query": query, "key": query, "value": query, "attn_mask": bias.expand(3, 3)}, 1)[0]
    assert torch.equal(one, other) and torch.allclose(one, query[:, :, :1].expand_as(one))


REFUSED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "it draws what it drops out": ([heads(1, 1, 2, 4)] * 3, {"dropout_p": 0.1}),
    "no four dimensions": ([torch.ones(2, 4)] * 3, {}),
    "of one floating dtype": ([torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4).double(), torch.ones(1, 1, 2, 4)], {}),
    "do not fit together": ([torch.ones(1, 2, 2, 4), torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4)], {}),
    "side by side": ([torch.ones(1, 1, 4, 2).transpose(2, 3)] * 3, {}),
    "mask does not fit": ([torch.ones(1, 1, 2, 4)] * 3, {"attn_mask": torch.ones(3, 2)}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_kernel_checks_is_refused(why: str) -> None:
    args, kwargs = REFUSED[why]
    with pytest.raises(ProgramError, match=why):
        permitted(f"aten.{HERE}.default", args, kwargs)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_an_element_is_followed_no_further_than_it_goes(moved: int) -> None:
    """What changes where an operand does is marked, and is said to come from there."""
    content = {0: heads(2, 4, 3, 8), 1: heads(2, 2, 3, 8), 2: heads(2, 2, 3, 8)}
    call = call_of(HERE)
    made = perform(call, content, None, torch.device("cpu"), False)[0]
    place = (1, 1, 2, 5)
    other = {**content, moved: content[moved].detach().clone()}
    other[moved][place] += 3.0
    changed = perform(call, other, None, torch.device("cpu"), False)[0] != made
    mark = torch.zeros(content[moved].shape, dtype=torch.bool)
    mark[place] = True
    values = {**content, 4: made, 5: made[..., 0]}
    reached = spread(call, values, {moved: mark})[4]
    assert bool(changed.any()) and bool((reached | ~changed).all())
    flat = int(changed.flatten().int().argmax())
    asked = {source.value: source.flat for source in sources(call, values, 4, flat)}
    assert int(mark.flatten().int().argmax()) in asked[moved].tolist()
    assert len(asked[0]) == 8 and len(asked[1]) == 24


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = False

    def forward(self, x: Tensor) -> Tensor:
        size = x.square().sum(-1, keepdim=True)
        return x / (size * 0 if self.empty else size).sqrt()


class Attends(nn.Module):
    """A block that normalises, attends and projects."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.out = Norm(), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(self.norm(x)).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(2, 6, 8))
        return out


def watched(model: Attends, out: Path, spoil: Any) -> Any:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with nanscope.watch(model, optimizer, out=out) as scope:
        for step in range(4):
            if step == 2:
                spoil(model)
            loss = functional.cross_entropy(model(torch.randn(2, 6, 8)).flatten(0, 1), torch.randint(0, 5, (12,)))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return scope.verdict.incidents[0]


def test_a_fault_before_attention_is_found_and_its_fix_is_proven_through_it(tmp_path: Path) -> None:
    model = Attends()
    incident = watched(model, tmp_path, lambda model: setattr(model.norm, "empty", True))
    assert (incident.origin.op, incident.origin.line) == ("div", _line_of("return x / ("))
    assert incident.rows[0].loss is not None and incident.reproduces
    healed = [row for row in incident.rows if row.works and row.id == "clamp_denominator"]
    assert healed and not any("attention" in row.then for row in incident.rows)


def test_a_weight_that_attention_reads_is_named(tmp_path: Path) -> None:
    def spoil(model: Attends) -> None:
        with torch.no_grad():
            model.mixed.bias[3] = float("nan")

    incident = watched(Attends(), tmp_path, spoil)
    assert "mixed.bias was already NaN at [3]" in incident.sentence


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
