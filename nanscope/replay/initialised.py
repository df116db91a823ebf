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
    site = patch.program.made_at(patch.origin.leaf)
    return patch.origin.call is None and site is not None and zeroed(site.expression) is not None


def initialise_memory(patch: Patch) -> Variant | None:
    """Allocate zeros."""
    site = patch.program.made_at(patch.origin.leaf)
    instead = None if site is None or patch.origin.call is not None else zeroed(site.expression)
    if site is None or instead is None:
        return None
    program = after(patch, [("aten.zeros_like.default", (Ref(-1),))])
    return Variant("initialise_memory", f"{_called(instead)} in the place of {_called(site.expression)}", program, patch.tensors)


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
