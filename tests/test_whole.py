"""Where an element of a shard stands in the whole weight: held against torch's own sharding of a weight that counts its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanscope.program.whole import whole

WORLD = 4


@pytest.fixture(params=range(WORLD))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of four, the others of which do not exist: who asked them would wait for nobody, and read rubbish."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    torch.distributed.destroy_process_group()


def counting(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def spread(*placements: Shard | Replicate) -> Callable[[Tensor], DTensor]:
    mesh_shape = (WORLD,) if len(placements) == 1 else (2, 2)
    return lambda full: distribute_tensor(full, init_device_mesh("cpu", mesh_shape), placements, src_data_rank=None)


def sharded(parallel: ColwiseParallel | RowwiseParallel | None) -> Callable[[Tensor], Tensor]:
    """FSDP2 over the rows of a mesh; over tensor parallel layers, or replicated over its columns."""

    def weight_of(full: Tensor) -> Tensor:
        data, model = (f"{name} as of {torch.distributed.get_rank()}" for name in ("data", "model"))  # torch keeps meshes by their names
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(data, model))
        net = nn.Sequential(nn.Linear(full.shape[1], full.shape[0], bias=False))
        net[0].weight.data = full
        if parallel is not None:
            parallelize_module(net, mesh[model], {"0": parallel}, src_data_rank=None)
        fully_shard(net, mesh=mesh[data] if parallel is not None else mesh)
        found: Tensor = net[0].weight.data
        return found

    return weight_of


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "rows": ((8, 3), spread(Shard(0))),
    "rows, uneven": ((6, 3), spread(Shard(0))),
    "columns": ((3, 8), spread(Shard(1))),
    "both": ((5, 7), spread(Shard(0), Shard(1))),
    "rows twice": ((10, 3), spread(Shard(0), Shard(0))),
    "some replicas": ((6, 2), spread(Replicate(), Shard(0))),
    "hsdp": ((7, 3), sharded(None)),
    "fsdp2 over columnwise": ((8, 3), sharded(ColwiseParallel())),
    "fsdp2 over columnwise, uneven": ((14, 3), sharded(ColwiseParallel())),
    "fsdp2 over rowwise": ((6, 8), sharded(RowwiseParallel())),
}


@pytest.mark.parametrize("case", CASES)
def test_an_element_of_a_shard_has_its_place_in_the_whole(case: str, rank: int) -> None:
    """Each element that this rank holds says where in the whole it stands."""
    shape, spread_out = CASES[case]
    tensor = spread_out(counting(*shape))
    assert isinstance(tensor, DTensor)
    part = tensor.to_local()
    for flat, value in enumerate(part.flatten().tolist()):
        index = tuple(int(at) for at in torch.unravel_index(torch.tensor(flat), part.shape))
        assert whole(tensor, index) == (tuple(int(at) for at in torch.unravel_index(torch.tensor(int(value)), shape)), shape)


def test_what_is_no_part_has_no_other_place(rank: int) -> None:
    """A plain tensor, a replica, a sum that is not made yet, and an index beyond what is here."""
    mesh = init_device_mesh("cpu", (WORLD,))
    assert whole(counting(3, 3), (1, 1)) is None
    assert whole(distribute_tensor(counting(3, 3), mesh, [Replicate()], src_data_rank=None), (1, 1)) is None
    assert whole(distribute_tensor(counting(8, 3), mesh, [Shard(0)], src_data_rank=None), (2, 0)) is None
