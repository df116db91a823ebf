"""Functions that torch has compiled: each call of one is remembered, as that of a module is, for a second look.

    policy_loss = torch.compile(policy_loss)
    loss = policy_loss(log_probs, old, advantages, mask)     one opaque value; what it was given is held until backward is over

What is compiled stays compiled, and the tape sees nothing inside. A call inside of a module belongs to that, and so does one inside of
another compiled function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from nanscope.capture import generators
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.modules import Began, Compiled, ModuleWatch, Own, has_weights
from nanscope.capture.unseen import unseen
from nanscope.torch_inside import Returned, around_compiled_calls, count_function_modes

Known = tuple[ModuleWatch, Began, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def install(own: Own, failsafe: Failsafe, undo: contextlib.ExitStack) -> None:
    """Listen for calls of compiled functions in threads that are watched. undo: ends that."""

    def begin(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        watch, found = own.modules, list[Began | None]()
        if watch is not None and not _is_call_of_module(function):
            failsafe("compiled", lambda: found.append(watch.begin_function(generators.given([args, kwargs]))))
        began = found[0] if found else None
        return None if watch is None or began is None else (watch, began, function, args, kwargs)

    def end(known: Known, returned: Returned) -> None:
        failsafe("compiled", _remember, known, returned)

    undo.callback(around_compiled_calls(begin, end))


def _remember(known: Known, returned: Returned) -> None:
    watch, began, function, args, kwargs = known
    if not watch.busy:
        with unseen() if count_function_modes() else contextlib.nullcontext():  # no call is made that another mode would see
            watch.end_function(Compiled(function, _models(function, args, kwargs)), began, args, kwargs, returned)


def _is_call_of_module(function: Any) -> bool:
    """Is it what `module.compile()` compiles? The hooks on modules tell of that."""
    return _is_module(getattr(function, "__self__", None)) and function.__name__.endswith(("_call_impl", "__call__"))


def _models(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The modules with weights that a function reaches: its own, those that it is given, and those that it names."""
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    reached: list[Any] = [owner, *args, *kwargs.values()]
    if not (_is_module(owner) or isinstance(owner, type)):
        reached += getattr(owner, "__dict__", {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            reached.append(cell.cell_contents)
    space = getattr(function, "__globals__", {})
    reached += [space[name] for name in getattr(getattr(function, "__code__", None), "co_names", ()) if name in space]
    return [one for one in dict.fromkeys(filter(_is_module, reached)) if has_weights(one)]


def _is_module(thing: object) -> bool:
    return issubclass(type(thing), nn.Module)  # what a proxy says of its class is not asked
