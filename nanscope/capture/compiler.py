"""What `torch.compile` must not notice of us: it compiles as often as without us, and the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from nanscope.capture.failsafe import Failsafe

Register = dict[int, Any]  # hooks, or flags of hooks, by the id of their handle


def never_compile(function: Callable[..., Any], nested: bool = True) -> None:
    """Let a function of ours run as it is where it is called from code that torch compiles. nested: and what it calls."""
    if isinstance(function, FunctionType):
        rest = _FrameAction.SKIP if nested else _FrameAction.DEFAULT
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, rest))


def called_for_real(hook: Callable[..., Any]) -> None:
    """Let compiled code call a hook of ours, instead of tracing what it would do. Only where torch itself breaks the graph already."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]


def hide(registers: list[Register], ours: set[int], failsafe: Failsafe, undo: contextlib.ExitStack) -> None:
    """Take global hooks of ours off while torch compiles: what it finds of hooks then, it looks for whenever the compiled code is to run.

    Where others have hooks like these the compiled code depends on them anyway, and expects to find the same that it was made with.
    """
    from torch._dynamo.callback import callback_handler

    hidden: list[tuple[Register, int, Any]] = []

    def begin(about: object) -> None:
        found = [hook for register in registers for hook in register.values() if not isinstance(hook, bool)]
        if all(str(getattr(hook, "__module__", "")).startswith("nanscope.") for hook in found):
            hidden.extend((register, key, register.pop(key)) for register in registers for key in ours & register.keys())

    def end(about: object) -> None:
        for register, key, hook in hidden:
            register[key] = hook
        hidden.clear()

    for callbacks, act in ((callback_handler.start_callbacks, begin), (callback_handler.end_callbacks, end)):
        callback = partial(failsafe, "compiler", act)
        callbacks.append(callback)
        undo.enter_context(contextlib.suppress(ValueError))  # `torch._dynamo.reset` empties the list
        undo.callback(callbacks.remove, callback)


def compiles_backward() -> bool:
    """Is compiled autograd on? It takes every hook of a backward pass for a part of the graph."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
