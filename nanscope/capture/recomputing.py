"""Functions of autograd that compute something anew in their backward, run through like any other code while a model is called once more.

A reentrant checkpoint, torch's or a framework's own, is given a function. It calls that without a gradient, and in its backward once more
with one: what goes wrong in there nobody but autograd sees, and torch refuses to differentiate it for chosen tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from nanscope.capture.modules import place_of, tensors_in
from nanscope.capture.unseen import unseen
from nanscope.torch_inside import function_of, tree_map_only

TURNS_ON = frozenset({"enable_grad", "set_grad_enabled"})
DIFFERENTIATES = frozenset({"backward", "grad"})


@contextlib.contextmanager
def run_through() -> Iterator[None]:
    """In this thread, what such a function returns is what the one that it was given returns, with the history that this has. That one is
    called as a checkpoint of the other kind, which takes no more memory."""
    original, thread = Function.__dict__["apply"], threading.get_ident()

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or not torch.is_grad_enabled() or not _computes_anew(kind):
            return original.__get__(None, kind)(*args, **kwargs)
        made: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            given = [stack.enter_context(_kept(arg, made)) if _is_function(arg) else arg for arg in args]
            return _with_history(original.__get__(None, kind)(*given, **kwargs), made)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _kept(function: Callable[..., Any], made: list[Tensor]) -> Iterator[Callable[..., Any]]:
    """Give a function as one that takes gradients; a module stays what it is otherwise. made: takes what it returns, which is handed on
    without its history."""
    called = function.forward if isinstance(function, nn.Module) else function

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            output = checkpoint(called, *args, use_reentrant=False, determinism_check="none", **kwargs)
        made.extend(tensors_in(output))
        with unseen():
            return tree_map_only(Tensor, Tensor.detach, output)

    if not isinstance(function, nn.Module):
        yield run
        return
    own = vars(function).get("forward")
    function.forward = run
    try:
        yield function
    finally:
        del function.forward
        if own is not None:
            function.forward = own


def _with_history(output: Any, made: list[Tensor]) -> Any:
    """Return what came out of it, what a function has made in there for what lies in the same place."""
    own = {place_of(tensor): tensor for tensor in made if tensor.requires_grad}
    found = [own.get(place_of(one), one) if isinstance(one, Tensor) else one for one in (output if type(output) is tuple else [output])]
    return tuple(found) if type(output) is tuple else found[0]


def _is_function(arg: object) -> bool:
    return callable(arg) and not isinstance(arg, (type, Tensor))


def is_checkpoint(node: Any) -> bool:
    """Is an autograd node that of a function which was given a function, and computes it anew in its backward?"""
    return _computes_anew(function_of(node)) and any(map(_is_function, getattr(node, "__dict__", {}).values()))


def _computes_anew(kind: Any) -> bool:
    """Does the backward of a function of autograd call something with gradients, and differentiate that?"""
    code = getattr(getattr(kind, "backward", None), "__code__", None)
    names = _names_in(code) if code is not None else frozenset()
    return not TURNS_ON.isdisjoint(names) and not DIFFERENTIATES.isdisjoint(names)


def _names_in(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
