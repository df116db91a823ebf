"""What watches a step: nobody, nanscope, and the other ways to look for NaN, each as its documentation says.

    with TOOLS["DebugMode + hook"](work) as after:
        work.step()
        after()         # what the tool wants to be told after each step

What a tool finds is of no interest here; who wants to know takes the context managers that it is made of.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanscope.errors import NanscopeError
from nanscope.torch_inside import RUN_HOOKS, debug_mode, tree_leaves
from nanscope.watching.scope import watch


class Watched(Protocol):
    """What can be trained under a tool.

    device: "cpu" or "cuda". folder: where runs are written, None for one of its own. whole: is a step expected to have a loss, a norm of
    its gradients, and headroom?
    """

    device: str
    folder: Path | None
    whole: bool

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def steps(self) -> int:
        """Steps of optimizers, made since the beginning."""

    def step(self) -> None:
        """Make one step, or as many as belong together."""

    def restore(self) -> None:
        """Go back to the start."""

    def weights(self) -> Sequence[Tensor]:
        """Return a copy of the weights."""


After = Callable[[], object]
Tool = Callable[[Watched], AbstractContextManager[After]]


def _nothing() -> None:
    return


@contextlib.contextmanager
def bare(work: Watched) -> Iterator[After]:
    """Nothing at all."""
    yield _nothing


@contextlib.contextmanager
def watched(work: Watched, deep_every: int = 0) -> Iterator[After]:
    """nanscope without deep looks, of which a run so short would be full.

    Afterwards: was each step seen, its loss recorded and its largest exponent read? Raises NanscopeError if not.
    """
    before = work.steps
    with contextlib.ExitStack() as stack:
        folder = work.folder or stack.enter_context(tempfile.TemporaryDirectory())
        with watch(out=folder, deep_every=deep_every) as scope:
            yield _nothing
        entries = scope.history.entries
        made = work.steps - before
        lost = sum(entry.loss is None or entry.grad_norm is None for entry in entries) if work.whole else 0
        if scope.steps != made or len(entries) != made or lost:
            raise NanscopeError(f"nanscope saw {scope.steps} of {made} steps, {lost} of them not whole", slug="bench-failed")
        if work.whole and work.device == "cpu" and any(entry.headroom is None for entry in entries):
            raise NanscopeError("nanscope did not record the loss", slug="bench-failed")


# -- the others --------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    """torch's anomaly mode."""
    with torch.autograd.detect_anomaly(check_nan=True):
        yield


@contextlib.contextmanager
def dispatched() -> Iterator[Any]:
    """torch's DebugMode with stack traces, and a hook on every call: torch has none of its own that looks for what is not finite.

    It marks calls that return what is not finite; born: NaN out of no NaN, or an infinity out of finite numbers. The mode is yielded.
    """

    def look(func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, bool] | None:
        results, given = tree_leaves(result), tree_leaves((args, kwargs))
        if all(map(finite, results)):
            return None
        return {"born": all(map(finite, given)) or (any(map(has_nan, results)) and not any(map(has_nan, given)))}

    kind: Any = debug_mode()
    with kind.dispatch_hooks(record_hook=look), kind(record_stack_trace=True) as mode:
        yield mode


def finite(leaf: Any) -> bool:
    """Is it no number, or only finite ones?"""
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex()) or bool(leaf.isfinite().all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def has_nan(leaf: Any) -> bool:
    """Is NaN among it?"""
    return bool(leaf.isnan().any()) if isinstance(leaf, Tensor) else isinstance(leaf, float) and math.isnan(leaf)


@contextlib.contextmanager
def underflow_overflow(model: nn.Module) -> Iterator[None]:
    """transformers' detector. It puts a forward hook on every module and has no way to take them off again."""
    with removed(model):
        importlib.import_module("transformers.debug_utils").DebugUnderflowOverflow(model)
        yield


class NotFinite(Exception):
    """Raised by the hook that people write themselves."""


@contextlib.contextmanager
def finite_hook(model: nn.Module) -> Iterator[None]:
    """The hook that people write themselves: is what a module returns finite?"""
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not all(map(finite, tree_leaves(output))):
            raise NotFinite(f"{names[module] or 'the model'} returned what is not finite")

    with removed(model):
        for module in model.modules():
            module.register_forward_hook(look)
        yield


@contextlib.contextmanager
def removed(model: nn.Module) -> Iterator[None]:
    """Take the hooks on modules off again that are put on meanwhile."""
    hooks = [getattr(module, RUN_HOOKS[1]) for module in model.modules()]
    before = [set(register) for register in hooks]
    try:
        yield
    finally:
        for register, known in zip(hooks, before, strict=True):
            for key in set(register) - known:
                del register[key]


# -- as tools of the benchmark -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _anomaly(work: Watched) -> Iterator[After]:
    with warnings.catch_warnings(action="ignore"), anomaly():  # it warns that it is slow
        yield _nothing


@contextlib.contextmanager
def _dispatched(work: Watched) -> Iterator[After]:
    with dispatched() as mode:
        yield mode.reset


@contextlib.contextmanager
def _underflow_overflow(work: Watched) -> Iterator[After]:
    with underflow_overflow(work.model):
        yield _nothing


@contextlib.contextmanager
def _finite_hook(work: Watched) -> Iterator[After]:
    with finite_hook(work.model):
        yield _nothing


BARE, AGAIN, NANSCOPE, DEEP = "bare", "bare again", "nanscope", "nanscope, a deep look each step"

OURS: dict[str, Tool] = {BARE: bare, NANSCOPE: watched, AGAIN: bare}
TOOLS: dict[str, Tool] = {
    BARE: bare,
    NANSCOPE: watched,
    DEEP: partial(watched, deep_every=1),
    AGAIN: bare,
    "detect_anomaly": _anomaly,
    "DebugUnderflowOverflow": _underflow_overflow,
    "DebugMode + hook": _dispatched,
    "isfinite hook": _finite_hook,
}


def absent() -> dict[str, str]:
    """Return the tools that cannot be tried here, each with the reason."""
    found = {}
    if util.find_spec("transformers") is None:
        found["DebugUnderflowOverflow"] = "transformers is not installed"
    if debug_mode() is None:
        found["DebugMode + hook"] = f"torch {torch.__version__} has no DebugMode with hooks"
    return found


def present() -> dict[str, Tool]:
    """Return the tools that can be tried here."""
    return {name: tool for name, tool in TOOLS.items() if name not in absent()}
