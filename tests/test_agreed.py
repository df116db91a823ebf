"""What ranks have put together, as the tape sees it: held in one process of a group whose others do not exist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.program.local import memory_of


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks")
def test_memory_that_all_ranks_have_reduced_is_told_from_that_of_some() -> None:
    """A group that is a part of the run says nothing of the others."""
    tape, of_all, of_some, own = Tape(), torch.ones(3), torch.ones(3), torch.ones(3)
    part = dist.new_group([0, 1])
    with TapeMode(tape):
        dist.all_reduce(of_all)
        dist.all_reduce(of_some, group=part)
    held = [[tape.agreed.holds(memory_of(tensor), by_all) for tensor in (of_all, of_some, own)] for by_all in (False, True)]
    assert held == [[True, True, False], [True, False, False]]
    tape.forget()
    assert not tape.agreed.holds(memory_of(of_all))


@pytest.mark.usefixtures("ranks")
def test_what_a_collective_writes_to_is_known_no_more() -> None:
    """Its content before that is nothing that a program may read."""
    tape, tensor = Tape(), torch.ones(3)
    with TapeMode(tape):
        total = tensor * 2.0
        before = tape.find(total)
        dist.all_reduce(total)
    assert before is not None and tape.find(total) is None


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("spread", "agreed"), [((Replicate(), Replicate()), 1), ((Replicate(), Partial()), 0), ((Shard(0), Replicate()), 0)]
)
def test_a_norm_is_agreed_where_each_rank_holds_the_same(spread: tuple[Replicate | Partial | Shard, ...], agreed: int) -> None:
    """Not while a part of it is still to be added."""
    tape, mesh = Tape(), init_device_mesh("cpu", (2, 2))
    norm = DTensor.from_local(torch.ones(1), mesh, spread, run_check=False)
    tape.agreed.norm(norm, norm.to_local())
    assert len(tape.agreed.norms) == agreed


@pytest.mark.usefixtures("ranks")
def test_a_norm_over_a_part_of_the_ranks_is_not_agreed() -> None:
    """Tensor parallel within data parallel: the other replicas have another one."""
    tape, mesh = Tape(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    norm = DTensor.from_local(torch.ones(1), mesh["model"], [Replicate()], run_check=False)
    tape.agreed.norm(norm, norm.to_local())
    assert not tape.agreed.norms


@pytest.mark.usefixtures("ranks")
def test_a_scalar_that_is_reduced_after_norms_were_taken_is_one() -> None:
    """As who shards by hand takes it: squares of the parts, their sum over all ranks, its root."""
    tape, gradient = Tape(), torch.ones(3)
    with TapeMode(tape), torch.no_grad():
        loss = torch.ones(())
        dist.all_reduce(loss)
        total = torch.linalg.vector_norm(gradient) ** 2
        dist.all_reduce(total)
    assert [norm is total for norm in tape.agreed.norms] == [True]


@pytest.mark.usefixtures("ranks")
def test_what_another_rank_sent_stays_known() -> None:
    """The stage of a pipeline receives into the same memory step after step."""
    tape, buffer = Tape(), torch.ones(3)
    with TapeMode(tape):
        dist.recv(buffer, src=0)
    tape.forget()
    assert tape.agreed.was_sent(buffer) and tape.agreed.was_sent(buffer.detach()) and not tape.agreed.was_sent(torch.ones(3))


@pytest.mark.usefixtures("ranks")
def test_what_another_rank_sent_can_be_swapped() -> None:
    """torch refuses while anybody refers to a tensor, weakly or not."""
    tape, buffer, other = Tape(), torch.ones(3), torch.zeros(3)
    with TapeMode(tape):
        dist.recv(buffer, src=0)
    tape.forget(everything=True)
    tape.agreed.let_go()
    torch.utils.swap_tensors(buffer, other)  # type: ignore[no-untyped-call]
    assert not buffer.any() and not tape.agreed.was_sent(buffer)
