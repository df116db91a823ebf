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
from torch.utils._python_dispatch import _disable_current_modes

_INFRA = tuple(torch._C._TorchDispatchModeKey.__members__.values())

_OURS = ContextVar("nanscope is at work", default=False)


def is_ours() -> bool:
    """Is what runs now in this thread work of ours, on behalf of any scope, and none of the trainer's?"""
    return _OURS.get()


def is_traced() -> bool:
    """Is what runs now being written down for later, and not computed? (torch.compile, jit.trace, export, make_fx, fake tensors)"""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_faked()


def is_faked() -> bool:
    """Do calls go through one of torch's own modes, which hand over tensors without content?"""
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _INFRA)


def is_watched() -> bool:
    """Would anybody but us notice a call that we make?"""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_anomaly_enabled()
        or torch._C._autograd._profiler_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    )


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Do our own work in here. Costs next to nothing where nobody else looks."""
    before = _OURS.set(True)
    try:
        with _past_others() if is_watched() else contextlib.nullcontext():
            yield
    finally:
        _OURS.reset(before)


@contextlib.contextmanager
def _past_others() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refused is not None:
            torch._C._autograd._saved_tensors_hooks_enable()
            stack.callback(torch._C._autograd._saved_tensors_hooks_disable, refused)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(_same, _same)
            stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
        if torch._C._autograd._profiler_enabled():
            torch._C._autograd._enable_record_function(False)
            stack.callback(torch._C._autograd._enable_record_function, True)
        yield


def _same(content: Any) -> Any:
    return content
