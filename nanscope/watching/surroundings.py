"""What surrounds a step: the trainer, its settings, its log, and the environment."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.source import variables
from nanscope.frameworks.rows import Framework
from nanscope.snapshot.record import now
from nanscope.watching.invoked import command, commit


def find_trainer(targets: Iterable[Any]) -> Any:
    """Return the trainer: one of the targets, or found as `self` of a calling frame; None if there is none."""
    for target in targets:
        if hasattr(target, "args") and hasattr(target, "state"):
            return target
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = variables(frame).get("self")
        if hasattr(getattr(found, "args", None), "logging_nan_inf_filter"):
            return found
        frame = frame.f_back
    return None


def sampled(framework: Framework | None) -> tuple[Tensor, Tensor | None] | None:
    """Return ids and mask of the sampled tokens, [B, T], from the local variable in which the framework keeps its batch."""
    if framework is None or framework.batch is None:
        return None
    local, ids, mask = framework.batch
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        held = variables(frame).get(local)
        if isinstance(held, Mapping) and isinstance(held.get(ids), Tensor):
            return held[ids], held.get(mask) if isinstance(held.get(mask), Tensor) else None
        frame = frame.f_back
    return None


def logged_loss(trainer: Any, loss: float | None, loss_bad: bool) -> list[tuple[str, str]]:
    """Return the note on what the trainer's log shows instead of the truth, if it filters."""
    if trainer is None or loss is None or not getattr(getattr(trainer, "args", None), "logging_nan_inf_filter", False):
        return []
    if loss_bad:
        text = f"the true loss is {loss}; the trainer's logging_nan_inf_filter keeps it out of the log, which shows a finite number"
    else:
        text = (
            f"the logged loss ({loss:.6g}) is finite and does not show that the gradients are not; "
            "once the weights are NaN, logging_nan_inf_filter logs 0.0 for every further step"
        )
    return [("logged_loss", text)]


def settings(trainer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the trainer's settings of these names, as JSON holds them."""
    args = getattr(trainer, "args", None)
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: value if isinstance(value, (int, float, str, bool, type(None))) else str(value) for name, value in found.items()}


@cache  # the disk is searched for it, and a run asks at its beginning, at every hit and at its end
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(loss: Tensor | None, package: str | None) -> dict[str, Any]:
    """Return how a run was started, when this was asked, versions, device and dtype. package: the framework's distribution."""
    like = torch.zeros(()) if loss is None else loss
    packages = ("torch", "nanscope", "transformers", "accelerate", *((package,) if package else ()))
    at = commit(sys.argv[0]) if sys.argv and sys.argv[0] else None
    return {
        "command": command(sys.argv),
        **({"commit": at} if at is not None else {}),
        "time": now(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
        "python": sys.version.split()[0],
        "device": like.device.type if like.device.type == "cpu" else torch.cuda.get_device_name(like.device),
        "dtype": str(like.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
