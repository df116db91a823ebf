"""What an operator leaves to the calls that it is made of, and a mode takes from them: counting writes, gradients, autocast.

Each write raises its tensor's version, by which autograd notices that something it saved was changed. For `mul_` a kernel above the mode
does it. The operators on lists (`_foreach_mul_`, and with it clipping and most optimizers), those that are made of others and those of
extensions have no such kernel: there it is done by the calls they are made of, and for these a mode switches it off. Then a backward that
raises without the mode returns a wrong gradient under it.

So with gradients: an operator of an extension that says nothing of its derivative has that of the calls in its kernel, and under a mode it
has none. And with autocast: what has no dtype there (an extension, `bilinear`, in inference mode `tensordot`) leaves that to its calls.
"""

from __future__ import annotations

import sys
from typing import Any

from nanscope.program.ops import MADE_OF_PRODUCTS, base_name
from nanscope.torch_inside import (
    CAST_KERNELS,
    CASTS,
    COUNTER,
    GRADIENT_KERNELS,
    GRADIENTS,
    as_before_modes,
    has_kernel,
    has_kernel_for,
    is_excluded,
    schema_of,
)


def left_inside(func: Any) -> tuple[Any, ...]:
    """Return the keys of what an operator leaves to the calls that it is made of, whether autocast is on or not."""
    return ((COUNTER,) if counts_inside(func) else ()) + ((GRADIENTS,) if flows_inside(func) else ())


def counts_inside(func: Any) -> bool:
    """Is what an operator writes, or a view that it makes, counted by the calls that it is made of?"""
    name = func.name()
    if not has_kernel(name):
        return False  # an operator of Python's alone, as those are that ask a jagged tensor for its size: it writes nothing
    may_write = schema_of(func).is_mutable or func.namespace != "aten" or has_kernel_for(name, "CompositeImplicitAutograd")
    return may_write and not has_kernel_for(name, "ADInplaceOrView")


def flows_inside(func: Any) -> bool:
    """Is the gradient of an operator that of the calls it is made of? Those of aten all have one of their own, or come to us in parts."""
    name = func.name()
    return func.namespace != "aten" and has_kernel(name) and not any(has_kernel_for(name, key) for key in GRADIENT_KERNELS)


def casts_inside(func: Any) -> bool:
    """Are calls that an operator is made of cast, where autocast is on around it?

    Those of aten that are not come out of one that is, or are no calls: `cdist` is cast, and what it is made of stays as it is.
    """
    name = func.name()
    if not has_kernel(name) or any(has_kernel_for(name, key) for key in CAST_KERNELS):
        return False
    return func.namespace != "aten" or has_kernel_for(name, "CompositeImplicitAutograd") or base_name(str(func)) in MADE_OF_PRODUCTS


def is_casting() -> bool:
    """Is autocast on around the call that is being handled? Inside of it torch says that it is not."""
    with as_before_modes():
        return not all(map(is_excluded, CASTS))


def to_let_in(keys: tuple[Any, ...]) -> list[Any]:
    """Return what the mode has switched off for the calls inside a call, and is to be on there: nothing that was off before.

    keys: what the operator leaves to them.
    """
    if not (keys or is_casting()) or not is_counted_here():
        return []
    with as_before_modes():
        return [key for key in (*keys, *CASTS) if not is_excluded(key)]


def is_counted_here() -> bool:
    """Would the calls inside the one that is handled have these without us? Not if a mode or a class of others has handed it on to us."""
    handler = sys._getframe(1)
    while handler.f_code.co_name != "__torch_dispatch__" and handler.f_back is not None:
        handler = handler.f_back
    frame = handler.f_back
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_code is not handler.f_code:
            return False
        frame = frame.f_back
    return True
