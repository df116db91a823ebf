"""`nanscope.program.shapes`: what is worked out of shapes is what torch would have said, and the compiler is not loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nanscope
from nanscope.program import cost
from nanscope.program.cost import without_content
from nanscope.program.ops import base_name
from nanscope.program.safety import bound
from nanscope.program.shapes import shapes_of

aten = torch.ops.aten
ROWS, ROW, CUBE = torch.rand(3, 4), torch.rand(4), torch.rand(2, 3, 4)
INDEX = torch.zeros(3, 2, dtype=torch.int64)

CALLS: list[tuple[Any, list[Any], dict[str, Any]]] = [
    (aten.add.Tensor, [ROWS, ROW], {}),
    (aten.mul.Tensor, [CUBE, torch.rand(3, 1)], {}),
    (aten.sub.Tensor, [torch.rand(1, 4), torch.rand(3, 1)], {"alpha": 2}),
    (aten.add.Tensor, [torch.rand(0, 4), torch.rand(1, 4)], {}),
    (aten.exp.default, [torch.tensor(1.0)], {}),
    (aten.where.self, [ROWS > 0.5, ROWS, torch.rand(1)], {}),
    (aten.masked_fill.Scalar, [ROWS, ROW > 0.5, 0.0], {}),
    (aten.maximum.default, [ROWS, ROW], {}),
    (aten.max.other, [ROWS, ROW], {}),
    (aten.max.default, [ROWS], {}),
    (aten.max.dim, [ROWS, -1], {}),
    (aten.min.dim, [CUBE, 1, True], {}),
    (aten.sum.default, [CUBE], {}),
    (aten.sum.dim_IntList, [CUBE, [0, -1]], {}),
    (aten.sum.dim_IntList, [CUBE, []], {}),
    (aten.mean.dim, [CUBE, [1], True], {}),
    (aten.amax.default, [CUBE, [-1]], {}),
    (aten.var.correction, [ROWS, [1]], {"correction": 1}),
    (aten.argmax.default, [ROWS, 1], {}),
    (aten.any.dim, [ROWS > 0.5, 0], {}),
    (aten.logsumexp.default, [ROWS, [1]], {}),
    (aten.linalg_vector_norm.default, [ROWS, 2, [1], True], {}),
    (aten._log_softmax.default, [ROWS, -1, False], {}),
    (aten.cumsum.default, [ROWS, 1], {}),
    (aten.view.default, [CUBE, [-1, 4]], {}),
    (aten.view.default, [CUBE, [24]], {}),
    (aten.reshape.default, [CUBE, [4, -1]], {}),
    (aten.expand.default, [ROW, [3, -1]], {}),
    (aten.unsqueeze.default, [ROWS, -1], {}),
    (aten.squeeze.dim, [torch.rand(3, 1), 1], {}),
    (aten.squeeze.default, [torch.rand(1, 3, 1)], {}),
    (aten.squeeze.dims, [torch.rand(1, 3, 1), [0, 1]], {}),
    (aten.transpose.int, [CUBE, 0, -1], {}),
    (aten.t.default, [ROWS], {}),
    (aten.permute.default, [CUBE, [2, 0, 1]], {}),
    (aten.select.int, [CUBE, -1, 2], {}),
    (aten.slice.Tensor, [ROWS, 1, 1, 9223372036854775807], {}),
    (aten.slice.Tensor, [ROWS, 1, -3, -1, 2], {}),
    (aten.gather.default, [ROWS, 1, INDEX], {}),
    (aten.scatter.value, [ROWS, 1, INDEX, 1.0], {}),
    (aten.embedding.default, [ROWS, INDEX], {}),
    (aten.cat.default, [[ROWS, torch.rand(2, 4)]], {}),
    (aten.cat.default, [[ROWS, ROWS], -1], {}),
    (aten.stack.default, [[ROW, ROW, ROW], 1], {}),
    (aten.mm.default, [ROWS, torch.rand(4, 5)], {}),
    (aten.bmm.default, [CUBE, torch.rand(2, 4, 5)], {}),
    (aten.addmm.default, [torch.rand(5), ROWS, torch.rand(4, 5)], {}),
    (aten.dot.default, [ROW, ROW], {}),
    (aten.arange.default, [7], {}),
    (aten.arange.start, [2, 7], {}),
    (aten.arange.start_step, [2, 7, 2], {}),
    (aten.zeros.default, [[3, 4]], {}),
    (aten.new_zeros.default, [ROWS, [2]], {}),
    (aten.zeros_like.default, [ROWS], {}),
    (aten.mse_loss.default, [ROWS, ROWS], {}),
    (aten.mse_loss.default, [ROWS, ROWS, 0], {}),
    (aten.smooth_l1_loss.default, [ROWS, ROWS, 2], {}),
    (aten.nll_loss_forward.default, [ROWS, torch.zeros(3, dtype=torch.int64), None, 1, -100], {}),
    (aten.nll_loss_forward.default, [ROWS, torch.zeros(3, dtype=torch.int64), None, 0, -100], {}),
    (aten.log_sigmoid_forward.default, [ROWS], {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS, ids=lambda one: str(one) if callable(one) else "")
def test_shapes_and_toll_are_those_that_torch_gives(
    function: Any, args: list[Any], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the call itself, and by one of tensors without content, under a mode that counts."""
    made = function(*args, **kwargs)
    real = [tuple(one.shape) for one in (made if isinstance(made, tuple) else (made,))]
    assert shapes_of(base_name(str(function)), bound(function, args, kwargs)) == real
    plain = cost.cost(function, args, kwargs, 1 << 40)
    monkeypatch.setattr(cost, "shapes_of", lambda name, given: None)
    assert cost.cost(function, args, kwargs, 1 << 40) == plain


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("index", {"self": ROWS, "indices": [INDEX]}),
        ("reshape", {"self": CUBE.transpose(0, 1), "shape": [-1]}),
        ("view", {"self": ROWS, "size": ["many"]}),
        ("select", {"self": ROWS, "dim": 7, "index": 0}),
        ("arange", {"end": 1.5}),
        ("cat", {"tensors": []}),
        ("cat", {"tensors": [torch.empty(0), ROWS]}),
        ("all", {"self": ROWS > 0.5, "dim": []}),
        ("unheard_of", {}),
    ],
)
def test_what_is_not_plain_is_for_torch_to_say(name: str, given: dict[str, Any]) -> None:
    """Content, copies on the way, and arguments that make no sense."""
    assert shapes_of(name, given) is None


@pytest.mark.parametrize("large", [1 << 24, 0])
def test_a_replay_loads_no_compiler(tmp_path: Path, large: int) -> None:
    """torch does, for modes, for tensors without content and for weights of a backward pass that are given: seconds at each command."""
    logps = torch.zeros(2, 4, requires_grad=True)
    with nanscope.watch(out=tmp_path):
        ratio = torch.exp(logps + torch.tensor([0.0, 0.0, 0.0, 100.0]))
        ((ratio - ratio.detach().clamp(0.8, 1.2)) * torch.tensor([1.0, 1.0, 1.0, 0.0])).sum(-1).mean().backward()
    file = next(tmp_path.rglob("*.safetensors"))
    by_rows = f"import nanscope.program.by_rows; nanscope.program.by_rows.LARGE = {large}"
    script = f"import nanscope, sys; {by_rows}; print(nanscope.replay({str(file)!r})); print(*sorted({{'torch._dynamo', 'sympy'}} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "goes wrong again" in told[0] and told[1:] == [""]


ON_META: tuple[tuple[str, list[Any]], ...] = (
    ("sub.Tensor", [torch.zeros(3, 4), torch.zeros(3, 1)]),
    ("mul.Tensor", [torch.zeros(3, 4), torch.zeros(3, 1).expand(3, 4)]),
    ("add.Tensor", [torch.zeros(3, 5)[:, 1:], torch.zeros(4, dtype=torch.float64)]),
    ("add.Tensor", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros((), dtype=torch.float64)]),
    ("mul.Tensor", [torch.zeros(4, 3).t(), torch.zeros(3, 4)]),
    ("div.Tensor", [torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]),
    ("gt.Scalar", [torch.zeros(3, 4), 0.5]),
    ("where.self", [torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 4), torch.zeros(())]),
    ("masked_fill.Scalar", [torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bool), 0.0]),
    ("sum.dim_IntList", [torch.zeros(3, 4, dtype=torch.bool), [-1], True]),
    ("mean.default", [torch.zeros(3, 4)]),
    ("var.correction", [torch.zeros(3, 4), [1]]),
    ("softmax.int", [torch.zeros(3, 4), 1]),
    ("clone.default", [torch.zeros(4, 3).t()]),
)


@pytest.mark.parametrize(("op", "args"), ON_META, ids=[op for op, _ in ON_META])
def test_what_is_made_without_content_is_what_torch_makes(op: str, args: list[Any]) -> None:
    """Shape, dtype, and how it lies in memory."""
    name, overload = op.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    shown = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args]
    found, wanted = without_content(function, shown, {}), function(*shown)
    assert (found.shape, found.dtype, found.stride(), found.is_meta) == (wanted.shape, wanted.dtype, wanted.stride(), True)


def test_what_does_not_fit_together_is_for_torch_to_refuse() -> None:
    """Also where there is no content."""
    with pytest.raises(RuntimeError):
        without_content(torch.ops.aten.add.Tensor, [torch.zeros(3, device="meta"), torch.zeros(4, device="meta")], {})
