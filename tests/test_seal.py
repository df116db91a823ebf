"""Sealed: code may read anything, and nothing of what it draws, writes or starts comes out."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from nanscope.capture.alone import NotIsolated
from nanscope.capture.seal import Seal, Written, sealed

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x.view(2, 2)[0].zero_(),
    "an item": lambda x: x.__setitem__(0, 5.0),
    "out=": lambda x: torch.add(torch.ones(4), 1, out=x),
    "foreach": lambda x: torch._foreach_add_([torch.ones(4), x], 1.0),
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "a generator's": lambda x: x.uniform_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_was_there_is_refused_before_it_is_made(name: str) -> None:
    """Neither the numbers nor the version move; the same write to memory made in here goes through."""
    tensor = torch.arange(4.0)
    with pytest.raises(Written), torch.no_grad(), sealed(Seal()):
        WRITES[name](tensor)
    assert torch.equal(tensor, torch.arange(4.0)) and tensor._version == 0
    with torch.no_grad(), sealed(Seal()):
        WRITES[name](torch.ones(4) * 2)
    with torch.no_grad(), sealed(Seal([tensor])) as _:
        WRITES[name](tensor)
    assert not torch.equal(tensor, torch.arange(4.0))


def test_a_collective_is_refused() -> None:
    """The other ranks do not look: it would wait for them for ever."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotIsolated, match="collective"), sealed(Seal()):
            dist.all_reduce(torch.ones(2) * 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, None])
def test_generators_stand_where_they_stood(error: type[BaseException] | None) -> None:
    """However it ends; also a generator that nobody told us of."""
    own = torch.Generator().manual_seed(5)

    def states() -> list[object]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), own.get_state().tolist()]

    before = states()
    try:
        with sealed(Seal()):
            random.random()
            np.random.rand()
            torch.rand(3)
            torch.rand(3, generator=own)
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    assert states() == before


def test_hooks_of_others_sleep_in_this_thread_only() -> None:
    """Global module hooks are told nothing of what we run, and everything of what another thread runs; then they are as they were."""
    seen: list[str] = []
    module = nn.Linear(2, 2)
    handle = hooks.register_module_forward_hook(lambda *_: seen.append(threading.current_thread().name))
    try:
        table = dict(hooks._global_forward_hooks)
        with sealed(Seal()):
            module(torch.ones(2))
            other = threading.Thread(target=module, args=(torch.ones(2),), name="other")
            other.start()
            other.join()
        assert seen == ["other"] and dict(hooks._global_forward_hooks) == table
    finally:
        handle.remove()


def test_the_process_is_not_ended_from_in_here() -> None:
    """Whoever calls sys.exit when something looks odd would end a run that goes on without us."""
    with pytest.raises(RuntimeError, match="end the process"), sealed(Seal()):
        raise SystemExit(3)


def test_nothing_is_compiled_in_here() -> None:
    """A compiled function runs as it is written, and afterwards as it was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    double = torch.compile(lambda x: x * 2, backend=counter)
    with sealed(Seal()):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert counter.frame_count == 0
    double(torch.ones(2))
    assert counter.frame_count == 1


def test_what_torch_hands_over_fresh_may_be_written_to() -> None:
    """An optimizer counts its steps in a tensor that it has just made."""
    with sealed(Seal()):
        count = torch.tensor(0.0)
        count += 1
    assert count == 1
