"""What no loss shows: weights and buffers that went bad although every step was fine.

Statistics of a BatchNorm are read in evaluation only, and a weight may be written to when nobody steps any more. A buffer that was not
finite from the beginning is meant to be so: masks are made of infinities.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nanscope.capture.modules import ModuleWatch
from nanscope.locate.observe import observe_made
from nanscope.program.local import local
from nanscope.program.numbers import count_bad, first_nonfinite, is_finite
from nanscope.snapshot.observation import Observation, Phase
from nanscope.torch_inside import buffers_of


class Remains:
    """Asked when a model is seen for the first time, after each update for the buffers, and when the block ends."""

    def __init__(self, modules: ModuleWatch) -> None:
        self._modules = modules
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owners: list[tuple[weakref.ref[nn.Module], str, str]] = []  # of buffers that were finite: module, attribute, full name

    def begin(self) -> None:
        """Look at the buffers of the models that were not seen before, in one transfer for each."""
        for model in list(self._modules.seen):
            if model not in self._known:
                self._known.add(model)
                found = [
                    (weakref.ref(module), name, f"{path}.{name}" if path else name)
                    for path, module in model.named_modules()
                    for name, _ in module.named_buffers(recurse=False)
                ]
                own = [(owner, tensor) for owner in found if (tensor := _readable(owner)) is not None]
                fine = torch.stack([is_finite(tensor).cpu() for _, tensor in own]).tolist() if own else []
                self._owners += [owner for (owner, _), flag in zip(own, fine, strict=True) if flag]

    def buffers(self) -> list[Tensor]:
        """Return the buffers that were finite when they were first seen, as they are now."""
        return [tensor for owner in self._owners if (tensor := _readable(owner)) is not None]

    def bad_buffer(self) -> Observation | None:
        """Return the first of them that is not finite any more."""
        for owner in self._owners:
            tensor = _readable(owner)
            if tensor is not None and (flat := first_nonfinite(tensor)) is not None:
                return observe_made("buffer", tensor, flat, None, "", Phase.WEIGHTS, owner[2])
        return None

    def bad(self, parameters: Iterable[Tensor]) -> Observation | None:
        """Return the first weight or buffer that is bad now, None if none is. parameters: of the optimizers, which may be in no model."""
        known = self._modules.parameters()
        weights = {id(one): one for one in (*(one for _, one in known.values()), *parameters) if one.requires_grad}
        if count_bad(list(weights.values())):
            bad = next(one for one in weights.values() if not bool(is_finite(one)))
            name = known[id(bad)][0] if id(bad) in known else "weight"
            return observe_made("parameter", bad, first_nonfinite(bad) or 0, None, "", Phase.WEIGHTS, name)
        return self.bad_buffer()


def _readable(owner: tuple[weakref.ref[nn.Module], str, str]) -> Tensor | None:
    """The buffer, where it is still there, can be read, and may be bad."""
    module = owner[0]()
    buffer = None if module is None else buffers_of(module).get(owner[1])
    part = None if buffer is None else local(buffer)
    return part if part is not None and part.is_floating_point() and part.numel() else None
