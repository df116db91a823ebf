"""What a run leaves behind: weights and buffers that are bad when the block ends, although no update that was seen made them so.

A buffer that held a NaN from the beginning is meant to, and infinity is what masks are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanscope.capture.modules import ModuleWatch
from nanscope.locate.observe import observe_made
from nanscope.program.local import local
from nanscope.program.numbers import count_bad, first_nonfinite, is_finite
from nanscope.snapshot.observation import Observation, Phase


class Remains:
    """Asked twice a run: a model is seen for the first time, and the block ends."""

    def __init__(self, modules: ModuleWatch) -> None:
        self._modules = modules
        self._began: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()  # buffer → had it no NaN? Still on its device

    def begin(self) -> None:
        """Look at the buffers of the models that were not seen before; nothing is read back."""
        for module in self._modules.seen:
            if module not in self._began:
                self._began[module] = {name: _has_no_nan(buffer) for name, buffer in _buffers(module)}

    def bad(self, parameters: Iterable[Tensor]) -> Observation | None:
        """Return the first weight or buffer that is bad now, None if none is. parameters: of the optimizers, which may be in no model."""
        named = {key: name for key, (name, _) in self._modules.parameters().items()}
        weights = {id(one): one for one in (*(one for _, one in self._modules.parameters().values()), *parameters) if one.requires_grad}
        if count_bad(list(weights.values())):
            bad = next(one for one in weights.values() if not bool(is_finite(one)))
            return observe_made("parameter", bad, first_nonfinite(bad) or 0, None, "", Phase.WEIGHTS, named.get(id(bad), "weight"))
        return next(filter(None, (self._bad_buffer(module) for module in list(self._began))), None)

    def _bad_buffer(self, module: nn.Module) -> Observation | None:
        known = self._began[module]
        now = {name: buffer for name, buffer in _buffers(module) if name in known}
        spoilt = {name: known[name] & ~_has_no_nan(buffer) for name, buffer in now.items()}
        flags = torch.stack([flag.cpu() for flag in spoilt.values()]).tolist() if spoilt else []
        for (name, buffer), bad in zip(now.items(), flags, strict=True):
            if bad:
                flat = int(torch.isnan(buffer).flatten().int().argmax())
                return observe_made("buffer", buffer, flat, None, "", Phase.WEIGHTS, name)
        return None


def _buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The buffers that can be read and may hold a NaN."""
    for name, buffer in module.named_buffers():
        part = local(buffer)
        if part is not None and part.is_floating_point() and part.numel():
            yield name, part


def _has_no_nan(buffer: Tensor) -> Tensor:
    low, _ = torch.aminmax(buffer if buffer.dtype.itemsize > 1 else buffer.float())
    return ~torch.isnan(low)
