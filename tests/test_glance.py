"""`nanscope.show`: a line for every tensor that there is, true to its elements, and seen by nobody."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from tensors import listed, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import nanscope
from nanscope.program import summary
from nanscope.program.glance import Glance, show
from nanscope.program.local import local

INF, NAN = math.inf, math.nan
ROWS = [torch.ones(2), torch.tensor([0.0, NAN, 3.0])]


@given(tensors())
def test_what_is_shown_is_what_a_loop_counts(tensor: Tensor) -> None:
    """Zeros, the middle one of the finite elements, and the rest as `summarise` has it, for every dtype and shape."""
    found, short = show(tensor).counts, nanscope.summarise(tensor)
    assert found is not None
    fine = [abs(n) if isinstance(n, complex) else float(n) for n in listed(tensor)]
    fine = [n for n in fine if math.isfinite(n)]
    assert found.zeros == fine.count(0.0)
    assert found.median == (statistics.median_low(fine) if fine else None)
    assert (found.minimum, found.maximum, found.first) == (short.minimum, short.maximum, short.first)
    assert (found.nan, found.posinf, found.neginf) == (short.nan, short.posinf, short.neginf)
    assert len(repr(show(tensor)).splitlines()) == 1


LINES = (
    (torch.tensor([[1.5, -2.0, 0.0]]), None, "[1, 3] float32 cpu, −2 … 1.5, median 0, 1 zero"),
    (torch.tensor([[1.5, -2.0]], requires_grad=True), None, "[1, 2] float32 cpu requires_grad, −2 … 1.5, median −2"),
    (torch.zeros(0, 3), None, "[0, 3] float32 cpu, empty"),
    (torch.zeros(0), torch.ones(0), "[0] float32 cpu, empty, 0 of 0 counted"),
    (torch.tensor(0.25, dtype=torch.bfloat16), None, "[] bfloat16 cpu, 0.25"),
    (torch.tensor(NAN), None, "[] float32 cpu, NaN!"),
    (torch.zeros(4), None, "[4] float32 cpu, 0"),
    (torch.tensor([True, False, True]), None, "[3] bool cpu, 0 … 1, median 1, 1 zero"),
    (torch.tensor([1 + 1j, complex(NAN, 1)]), None, "[2] complex64 cpu, 1.414, 1 of 2 bad, first at [1], NaN!"),
    (torch.tensor([1.0, INF, -INF]).half(), None, "[3] float16 cpu, 1, 2 of 3 bad, first at [1], −inf!, +inf!"),
    (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), None, "[2] float8_e4m3fn cpu, 1, 1 of 2 bad, first at [1], NaN!"),
    (
        torch.tensor([[1.0, 90.0, NAN], [INF, 0.0, 5.0]]),
        torch.tensor([1, 0, 1]),
        "[2, 3] float32 cpu, 0 … 90, median 1, 1 zero, 4 of 6 counted: 1 … 5, 2 of 6 bad, first at [0, 2], 0 masked, +inf!, NaN!",
    ),
    (torch.tensor([1.0, 2.0]), torch.zeros(2), "[2] float32 cpu, 1 … 2, median 1, 0 of 2 counted"),
    (torch.zeros(3, 4, device="meta"), None, "[3, 4] float32 meta, no numbers: a meta tensor is a shape alone"),
    (torch.tensor([[0.0, NAN], [2.0, 0.0]]).to_sparse(), None, "[2, 2] float32 cpu, sparse_coo, 2 stored, 2, 1 of 2 bad, NaN!"),
    (torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(), None, "[2, 2] float32 cpu, sparse_csr, 2 stored, 1 … 2, median 1"),
    (torch.nested.nested_tensor(ROWS), None, "[2, …] float32 cpu, nested, 2 rows, 0 … 3, median 1, 1 zero, 1 of 5 bad, NaN!"),
)


@pytest.mark.parametrize(("tensor", "mask", "line"), LINES, ids=[line for *_, line in LINES])
def test_the_line_of_any_tensor(tensor: Tensor, mask: Tensor | None, line: str) -> None:
    """Shape, dtype, device, what it is, its numbers, what the mask counts, and what is bad last; a REPL shows the same as print."""
    assert repr(nanscope.show(tensor, mask)) == str(nanscope.show(tensor, mask)) == line


def test_a_tensor_of_rows_says_so() -> None:
    """A jagged one has a size that is a name."""
    assert ", nested, 2 rows, 0 … 3, median 1, 1 zero, 1 of 5 bad, NaN!" in repr(
        show(torch.nested.nested_tensor(ROWS, layout=torch.jagged))
    )


def test_a_large_tensor_is_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the strides, the order of the elements is that of the index; the median is then that of a part, and said to be."""
    x = torch.arange(720.0).reshape(6, 1, 10, 12).transpose(0, 3)
    x[7, 0, 3, 2] = NAN
    x[7, 0, 3, 4] = -INF
    mask = torch.ones(10, 6)
    mask[3] = 0
    whole = show(x, mask)
    monkeypatch.setattr(summary, "PIECE", 50)
    assert show(x, mask) == whole
    assert whole.counts is not None and whole.counts.first == (7, 0, 3, 2) and whole.counts.masked == 2
    monkeypatch.setattr(summary, "SAMPLE", 100)
    found = show(x, mask).counts
    assert found is not None and found.sampled and found.median is not None and abs(found.median - 359) < 40
    assert "median ≈ " in repr(show(x, mask))


class Counting(TorchDispatchMode):
    """Counts the calls that it sees."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_nobody_sees_that_a_tensor_is_shown() -> None:
    """No mode, no graph, no random number; and in a mode whose tensors are none, a real one is still read."""
    x = torch.tensor([1.0, NAN], requires_grad=True)
    y = x * 2
    before = torch.random.get_rng_state()
    with Counting() as mode:
        assert "1 of 2 bad" in repr(show(y))
    assert mode.seen == 0
    assert torch.equal(torch.random.get_rng_state(), before)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    with FakeTensorMode():
        assert "1 of 2 bad" in repr(show(y))
        assert repr(show(torch.ones(3))) == "[3] float32 cpu, FakeTensor, no numbers that can be read in a FakeTensor"


def test_inside_a_transform_the_tensor_under_it_is_shown() -> None:
    """vmap hands over one row and computes all of them."""
    lines: list[str] = []

    def looked_at(row: Tensor) -> Tensor:
        lines.append(repr(show(row)))
        return row.sum()

    torch.vmap(looked_at)(torch.tensor([[1.0, 2.0], [NAN, 4.0]]))
    torch.func.grad(looked_at)(torch.tensor([1.0, 3.0]))
    assert lines == [
        "[2] float32 cpu, inside vmap: all [2, 2] of it, 1 … 4, median 2, 1 of 4 bad, NaN!",
        "[2] float32 cpu requires_grad, inside a transform, 1 … 3, median 1",
    ]


def test_memory_that_was_let_go_of_is_told() -> None:
    """Between two uses a sharded weight has a shape and no numbers."""
    weight = torch.ones(3)
    weight.untyped_storage().resize_(0)
    assert local(weight) is None
    assert repr(show(weight)) == "[3] float32 cpu, no memory at present: it was let go of"


def test_a_dtype_that_torch_cannot_convert_is_told() -> None:
    """There is a line all the same."""
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert repr(show(packed)).startswith("[4] float4_e2m1fn_x2 cpu, not read (")


@pytest.mark.parametrize("given", [None, [1.0], 3.0, "x"], ids=repr)
def test_what_is_no_tensor_is_refused(given: object) -> None:
    """By name, and with what makes one of it."""
    with pytest.raises(TypeError, match=f"tensor takes a tensor, not {type(given).__name__}"):
        show(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a mask of shape \[3\] does not broadcast to \[2, 4\]"):
        show(torch.zeros(2, 4), torch.ones(3))


def test_a_glance_is_frozen_and_holds_no_tensor() -> None:
    """It can be kept: nothing in it changes with the tensor, and no memory hangs on it."""
    x = torch.ones(3)
    seen = show(x)
    x.fill_(NAN)
    assert isinstance(seen, Glance) and repr(seen) == "[3] float32 cpu, 1"
    with pytest.raises(AttributeError):
        seen.shape = ""  # type: ignore[misc]
