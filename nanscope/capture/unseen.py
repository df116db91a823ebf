"""Our own work goes unseen: past the trainer's dispatch and function modes, saved-tensor hooks, anomaly mode and profiler, and past the
instruments of every other scope.

They see the calls that they would see without us, and none of them can make what we compute fail or come out differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from nanscope import torch_inside as inside

OURS = ContextVar("nanscope is at work", default=False)  # in this thread, on behalf of any scope


def is_ours() -> bool:
    """Is what runs now in this thread work of ours, on behalf of any scope, and none of the trainer's?"""
    return OURS.get()


def is_traced() -> bool:
    """Is what runs now being written down for later, and not computed? (torch.compile, jit.trace, export, make_fx, CUDA graphs)"""
    return torch.compiler.is_compiling() or inside.tracing_state() is not None or is_faked() or is_captured()


def is_captured() -> bool:
    """Do calls go into a CUDA graph? What they give holds nothing before that is replayed, and to read it would break the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def is_faked() -> bool:
    """Do calls go through one of torch's own modes, which hand over tensors without content?"""
    return inside.count_modes() > 0 and any(inside.infra_mode(key) is not None for key in inside.INFRA_KEYS)


def is_watched() -> bool:
    """Would anybody but us notice a call that we make?"""
    return bool(
        inside.count_modes()
        or inside.count_function_modes()
        or torch.is_anomaly_enabled()
        or inside.is_profiled()
        or inside.saved_hooks(True) is not None
        or inside.saved_hooks_refused() is not None
    )


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Do our own work in here. Costs next to nothing where nobody else looks."""
    before = OURS.set(True)
    try:
        with _past_others() if is_watched() else contextlib.nullcontext():
            yield
    finally:
        OURS.reset(before)


@contextlib.contextmanager
def _past_others() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside.without_functions())
        stack.enter_context(inside.without_modes())
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        refused = inside.saved_hooks_refused()
        if refused is not None:
            inside.allow_saved_hooks()
            stack.callback(inside.refuse_saved_hooks, refused)
        if inside.saved_hooks(True) is not None:
            inside.push_saved_hooks(_same, _same)
            stack.callback(inside.pop_saved_hooks)
        if inside.is_profiled():
            inside.record_functions(False)
            stack.callback(inside.record_functions, True)
        yield


def _same(content: Any) -> Any:
    return content
