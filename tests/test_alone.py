"""A look that one rank takes alone: what needs the others is refused before it is issued, and what does not goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nanscope.capture.alone import Alone, NotIsolated, alone, has_peers


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, which issues its collectives all the same."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


ASKS: dict[str, Callable[[DeviceMesh], object]] = {
    "all_reduce": lambda mesh: distributed.all_reduce(torch.ones(1)),
    "not waited for": lambda mesh: distributed.all_reduce(torch.ones(1), async_op=True),
    "broadcast": lambda mesh: distributed.broadcast(torch.ones(1), 0),
    "all_gather": lambda mesh: distributed.all_gather([torch.ones(1)], torch.ones(1)),
    "barrier": lambda mesh: distributed.barrier(),
    "an object": lambda mesh: distributed.all_gather_object([None], "word"),
    "functional": lambda mesh: functional.all_reduce(torch.ones(1), "sum", mesh),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_collective_is_refused_before_it_is_issued(name: str, mesh: DeviceMesh) -> None:
    """Whatever way it is asked for; nothing reaches the group."""
    group = distributed.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    with pytest.raises(NotIsolated, match="collective"), Alone():
        ASKS[name](mesh)
    assert group._get_sequence_number_for_group() == before


def test_what_needs_nobody_is_computed(mesh: DeviceMesh) -> None:
    """Plain tensors, shards, backward passes, and the end of what the trainer had issued."""
    issued = functional.all_reduce(torch.ones(2), "sum", mesh)
    weight = torch.ones(2, requires_grad=True)
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with Alone():
        (weight * 2).sum().backward()
        assert (sharded * 2).to_local().tolist() == [2.0, 2.0] and torch.as_tensor(issued + 1).tolist() == [2.0, 2.0]
    assert isinstance(weight.grad, Tensor) and weight.grad.tolist() == [2.0, 2.0]


def test_one_process_has_nobody_to_wait_for(mesh: DeviceMesh) -> None:
    """A group of one may be asked."""
    with alone():
        distributed.all_reduce(torch.ones(1))


def test_one_process_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a group of one."""
    assert not has_peers()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size, expected in ((1, False), (2, True)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        assert has_peers() is expected
