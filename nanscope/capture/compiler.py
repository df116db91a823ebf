"""What `torch.compile` must not notice of us: it compiles as often as without us, and the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from nanscope.capture.failsafe import Failsafe
from nanscope.torch_inside import UNTRACED, Register, compiler_callbacks, leave_uncompiled


def never_compile(function: Callable[..., Any], nested: bool = True) -> None:
    """Let a function of ours run as it is where it is called from code that torch compiles. nested: and what it calls."""
    if isinstance(function, FunctionType):
        leave_uncompiled(function.__code__, nested)


def called_for_real(hook: Callable[..., Any]) -> None:
    """Let compiled code call a hook of ours, instead of tracing what it would do. Only where torch itself breaks the graph already."""
    setattr(hook, UNTRACED, True)


def hide(registers: list[Register], ours: set[int], failsafe: Failsafe, undo: contextlib.ExitStack) -> None:
    """Take global hooks of ours off while torch compiles: what it finds of hooks then, it looks for whenever the compiled code is to run.

    Where others have hooks like these the compiled code depends on them anyway, and expects to find the same that it was made with.
    """
    hidden: list[tuple[Register, int, Any]] = []

    def begin(about: object) -> None:
        found = [hook for register in registers for hook in register.values() if not isinstance(hook, bool)]
        if all(str(getattr(hook, "__module__", "")).startswith("nanscope.") for hook in found):
            hidden.extend((register, key, register.pop(key)) for register in registers for key in ours & register.keys())

    def end(about: object) -> None:
        for register, key, hook in hidden:
            register[key] = hook
        hidden.clear()

    for callbacks, act in zip(compiler_callbacks(), (begin, end), strict=True):
        callback = partial(failsafe, "compiler", act)
        callbacks.append(callback)
        undo.enter_context(contextlib.suppress(ValueError))  # `torch._dynamo.reset` empties the list
        undo.callback(callbacks.remove, callback)
