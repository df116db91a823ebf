"""Swaps of what two tensors hold, by which `Module.to` moves sharded and quantized weights. torch refuses while others refer to one."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.threads import Threads
from nanscope.capture.unseen import is_ours


def install(threads: Threads, failsafe: Failsafe, undo: contextlib.ExitStack) -> None:
    """Let go of all that is held before two tensors swap. undo: puts torch's function back, unless somebody has put another one there."""
    original = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            failsafe("swap", threads.let_go)
        return original(*args, **kwargs)  # type: ignore[no-untyped-call]

    def take_down() -> None:
        if torch.utils.swap_tensors is swap_tensors:
            torch.utils.swap_tensors = original

    undo.callback(take_down)
    torch.utils.swap_tensors = swap_tensors
