"""The part of a tensor that is here: what is wrapped, sharded, nested or sparse is read by its own memory, or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from nanscope.program.local import is_plain, local, unreadable
from nanscope.program.numbers import at, count_bad, first_nonfinite, is_finite, norms, same_bits

NAN = math.nan


class Opaque(Tensor):
    """A wrapper that nobody knows, and that must not be asked anything."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        made: Opaque = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was asked of it")


class Named(Tensor):
    """A subclass that only adds to torch's own: a tensor like any other."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Seen(TorchDispatchMode):
    """Which calls were made on wrappers, or to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types or "c10d" in func.namespace:
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_a_distributed_tensor_is_read_by_its_shard(mesh: DeviceMesh, placement: Any) -> None:
    """All questions are put to the memory in here: not one goes to the tensor over all ranks, which would ask the others."""
    inner = torch.tensor([1.0, NAN, 3.0])
    spread = DTensor.from_local(inner, mesh, [placement], run_check=False).requires_grad_()
    with Seen() as seen:
        assert not bool(is_finite(spread)) and count_bad([spread, inner]) == 2 and first_nonfinite(spread) == 1
        assert at(spread, 2) == 3.0 and norms([spread, torch.ones(4)]).tolist()[1] == 2.0 and same_bits(spread, spread)
        part = local(spread)
    assert seen.calls == []
    assert part is not None and type(part) is Tensor and part.data_ptr() == inner.data_ptr() and not part.requires_grad
    assert not is_plain(spread) and is_plain(inner)


def test_wrappers_within_wrappers_are_all_taken_off(mesh: DeviceMesh) -> None:
    """A shard that is still on its way is waited for, as its reader would."""
    inner = torch.tensor([1.0, 2.0])
    spread = DTensor.from_local(AsyncCollectiveTensor(inner), mesh, [Shard(0)], run_check=False)
    part = local(spread)
    assert part is not None and type(part) is Tensor and part.tolist() == [1.0, 2.0]


def test_what_cannot_be_read_is_asked_nothing() -> None:
    """A wrapper of unknown kind, memory that was let go of, a tensor without memory: finite and 0, and named for who tells it."""
    gone, view = torch.ones(8), torch.ones(8)[4:]
    for tensor in (gone, view):
        tensor.untyped_storage().resize_(0)
    found = [Opaque(torch.tensor([NAN])), gone, view, torch.empty(3, device="meta")]
    assert [local(tensor) for tensor in found] == [None] * 4
    assert count_bad(found) == 0 and norms(found).tolist() == [0.0] * 4 and all(bool(is_finite(tensor)) for tensor in found)
    assert first_nonfinite(found[0]) is None and math.isnan(at(found[0], 0)) and not same_bits(found[0], found[0])
    assert unreadable([*found, torch.ones(1)]) == ["Opaque", "Tensor"]


@pytest.mark.parametrize("layout", ["jagged", "nested", "coo", "csr"])
def test_nested_and_sparse_tensors_are_read_by_their_values(layout: str) -> None:
    """What no row or no entry holds is not there; the rest is read as it lies."""
    dense = torch.tensor([[1.0, 0.0], [0.0, NAN]])
    parts = [torch.tensor([1.0]), torch.tensor([2.0, NAN])]
    made = {
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "coo": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
    }[layout]().requires_grad_()
    part = local(made)
    assert part is not None and is_plain(part) and not is_plain(made) and count_bad([made]) == 1
    assert [value for value in part.tolist() if value == value] == ([1.0, 2.0] if layout in ("jagged", "nested") else [1.0])


def test_an_ordinary_subclass_is_a_tensor_like_any_other() -> None:
    """Parameters, empty tensors, and subclasses without a dispatch of their own."""
    for tensor in (torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Named), torch.zeros(0), torch.zeros(2, 0)):
        part = local(tensor)
        assert is_plain(tensor) and part is not None and part.shape == tensor.shape and not part.requires_grad
