"""The edit of memory that a loss read before anybody had written to it: zeros, where it was allocated.

torch.empty(4, 12)    torch.zeros(4, 12)
"""

from __future__ import annotations

from nanscope.program.calls import Ref
from nanscope.program.ops import UNWRITTEN_FACTORIES
from nanscope.replay.patch import Patch, Variant, after

UNWRITTEN = "this is memory that nobody has written to: it may as well hold finite numbers"


def is_unwritten(patch: Patch) -> bool:
    """Is the origin memory as the code of the loss has allocated it?"""
    return zeroed(_allocation(patch)) is not None


def initialise_memory(patch: Patch) -> Variant | None:
    """Allocate zeros."""
    allocation = _allocation(patch)
    instead = zeroed(allocation)
    if instead is None:
        return None
    program = after(patch, [("aten.zeros_like.default", (Ref(-1),))])
    return Variant("initialise_memory", f"{_called(instead)} in the place of {_called(allocation)}", program, patch.tensors)


def _allocation(patch: Patch) -> str:
    """The code that allocated the memory of the origin, "" where that was made or is written to by a call."""
    site = patch.program.made_at(patch.origin.leaf) if patch.origin.call is None else None
    return "" if site is None else site.expression


def zeroed(expression: str) -> str | None:
    """Return the text of a call that allocates memory as one that allocates zeros, None if it is none.

    `torch.empty(4, 12)`, `x.new_empty(12)`, `torch.empty_like(x)`.
    """
    called, bracket, rest = expression.partition("(")
    owner, dot, name = called.rpartition(".")
    if not bracket or name.removesuffix("_like") not in UNWRITTEN_FACTORIES:
        return None
    return f"{owner}{dot}{name.replace('empty', 'zeros')}{bracket}{rest}"


def _called(expression: str) -> str:
    return expression.partition("(")[0]
