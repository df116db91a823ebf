"""What is said of a gradient or a weight that went bad where no loss is to blame: by an update, a hook, another rank, who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.capture.modules import Compiled
from nanscope.capture.source import definition_of
from nanscope.locate.observe import observe_gradient, observe_made, observe_weight
from nanscope.program.calls import Site
from nanscope.program.numbers import first_nonfinite
from nanscope.snapshot.observation import CHANGED, COMPILED_BACKWARD, HANDED, HOOKED, RECEIVED, REDUCED, Kind, Observation, Phase
from nanscope.torch_inside import gradient_hooks
from nanscope.watching.look import Look
from nanscope.watching.optimizers import is_torchs
from nanscope.watching.recording import Recording


def update_seen(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str | None) -> Observation:
    """Return what an update did to a weight that it made non-finite. Of an optimizer that is none of torch's no formula is known, but where
    it is written."""
    group = next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    kind = type(optimizer)
    seen = replace(observe_weight(name, parameter, first_nonfinite(parameter) or 0, group), optimizer=kind.__name__)
    if is_torchs(optimizer):
        return seen
    site = definition_of(kind.step, f"{kind.__name__}.step")
    origin = seen.origin if seen.facts.eps_underflow else replace(seen.origin, op="unknown")  # else it divides by that
    return replace(seen, origin=origin if site is None else replace(origin, file=site.file, line=site.line, function=site.function))


def by_hook(name: str, weight: nn.Parameter, optimizer: str) -> Observation:
    """Return a weight that a hook on its gradient made non-finite, with the line of the hook where there is one."""
    seen = replace(observe_weight(name, weight, first_nonfinite(weight) or 0, {}), optimizer=optimizer)
    site = _site_of_hook(gradient_hooks(weight))
    origin = replace(seen.origin, op="opaque", operands=())
    return replace(seen, origin=origin if site is None else replace(origin, file=site.file, line=site.line, function=site.function))


def _site_of_hook(hooks: Sequence[Any]) -> Site | None:
    code = getattr(getattr(hooks[0], "__func__", hooks[0]), "__code__", None) if len(hooks) == 1 else None
    return None if code is None else Site(code.co_filename, code.co_firstlineno, code.co_qualname)


def handed(gradient: Tensor) -> Observation:
    """Return a gradient that backward was given to begin with."""
    return late("", gradient, HANDED)


def received(tensor: Tensor) -> Observation:
    """Return what another rank has sent."""
    seen = observe_made(RECEIVED, tensor, first_nonfinite(tensor) or 0, None, "", Phase.INPUT)
    return replace(seen, kind=Kind.ARRIVED)


def arrived(name: str, gradient: Tensor, by: str = REDUCED, weight: Tensor | None = None) -> Observation:
    """Return a gradient that is bad although this rank's own backward, made once more, is not. by: SPREAD where it could not be made."""
    return replace(late(name, gradient, by, weight=weight), kind=Kind.ARRIVED)


def late(name: str, gradient: Tensor, by: str, site: Site | None = None, weight: Tensor | None = None) -> Observation:
    """Return the gradient of a weight that is bad although nothing was at the edge of the loss. by: what is known of how. site: where."""
    return observe_gradient(by, name, gradient, first_nonfinite(gradient) or 0, site, weight)


def hooked(name: str, gradient: Tensor, recording: Recording, hooks: Sequence[Any]) -> Observation:
    """Return a gradient that backward, made once more, makes without a NaN. hooks: that may have changed it; of one its line is told."""
    if not hooks and any(isinstance(call.module, Compiled) for call in recording.calls):
        return late(name, gradient, COMPILED_BACKWARD)
    return late(name, gradient, HOOKED if hooks else CHANGED, _site_of_hook(hooks))


def written(name: str, gradient: Tensor, look: Look, by: str, weight: Tensor | None = None) -> Observation:
    """Return a gradient into which the trainer wrote what is bad. look: through what was done to it after backward."""
    maker = None if look.location is None else look.program.maker(look.location.origin.value_id)
    calls = [*([] if maker is None else [maker]), *reversed(look.program.calls)]
    site = next((site for call in calls if (site := look.program.site_of(call)) is not None), None)
    alike = look.location is not None and look.location.origin.shape == tuple(gradient.shape)
    flat = look.location.origin.flat if look.location is not None and alike else first_nonfinite(gradient) or 0
    return observe_gradient(by, name, gradient, flat, site, weight)
