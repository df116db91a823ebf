"""While we look at a step, no call may need another rank: he looks at nothing, and would be waited for without end.

A second look runs what is the trainer's own code: a module, a custom backward, the step of an optimizer. Any of them may gather, reduce or
wait at a barrier. Such a call is refused before it is issued, and the look comes to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanscope.program.local import is_wrapper
from nanscope.torch_inside import FAKE_TENSORS, Mode, schema_of

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # they end what was issued before


class NotIsolated(LookupError):
    """Something cannot be run again by this process alone, without touching what is the trainer's; the message says why."""


def has_peers() -> bool:
    """Is this process one of several that train together?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def refuse_collective(func: Any) -> None:
    """Raise NotIsolated if an operator needs the other ranks."""
    if getattr(func, "namespace", "") in _COLLECTIVES and schema_of(func).name.split("::")[1] not in _LOCAL:
        raise NotIsolated(f"it takes part in a collective ({func}), and the other ranks do not look")


class Alone(Mode):
    """Refuses collectives. A tensor that is spread over ranks takes its calls apart first: only then is seen what they ask of others."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        refuse_collective(func)
        if any(is_wrapper(kind) and not kind.__module__.startswith(FAKE_TENSORS) for kind in types or ()):
            return NotImplemented
        return func(*args, **(kwargs or {}))


@contextmanager
def alone() -> Iterator[None]:
    """Refuse whatever needs other ranks, if there are any."""
    if has_peers():
        with Alone():  # type: ignore[no-untyped-call]
            yield
    else:
        yield
