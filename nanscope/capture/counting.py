"""Under a mode torch counts a write as without one only if it counts it above the mode; what is left to the call itself is let count here.

Each write raises its tensor's version, by which autograd notices that something it saved was changed. For `mul_` a kernel above the mode
does it. The operators on lists (`_foreach_mul_`, and with it clipping and most optimizers), those that are made of others and those of
extensions have no such kernel: there it is done by the calls they are made of, and for these a mode switches it off. Then a backward that
raises without the mode returns a wrong gradient under it.
"""

from __future__ import annotations

import sys
from typing import Any

from nanscope.torch_inside import has_kernel, has_kernel_for, schema_of


def counts_inside(func: Any) -> bool:
    """Is what an operator writes, or a view that it makes, counted by the calls that it is made of?"""
    name = func.name()
    if not has_kernel(name):
        return False  # an operator of Python's alone, as those are that ask a jagged tensor for its size: it writes nothing
    may_write = schema_of(func).is_mutable or func.namespace != "aten" or has_kernel_for(name, "CompositeImplicitAutograd")
    return may_write and not has_kernel_for(name, "ADInplaceOrView")


def is_counted_here() -> bool:
    """Would the call that is being handled have counted without us? Not if a mode or a class of others has handed it on to us."""
    handler = sys._getframe(1)
    while handler.f_code.co_name != "__torch_dispatch__" and handler.f_back is not None:
        handler = handler.f_back
    frame = handler.f_back
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_code is not handler.f_code:
            return False
        frame = frame.f_back
    return True
