"""What the trainer measures of gradients before it clips them: the norms that it takes without gradient, of which tensors, and where.

And by what it then multiplies them all: who knows both need not read the gradients once more to know the norm that they have now.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.raw import EACH, RawCall, each
from nanscope.capture.sites import NOWHERE, Place
from nanscope.capture.source import site_of
from nanscope.program.calls import Site
from nanscope.program.local import is_plain, local
from nanscope.torch_inside import writes_counted

NORMS, LARGEST = 4096, 64  # norms that are remembered, and elements of one: they are taken of a tensor, or of each of its rows
MEASURED = 1 << 16  # tensors of which a norm is remembered

Where = tuple[int, int]  # of a tensor: address and size


class Clipping:
    """What was seen of it since the last backward pass.

    norms: as they were taken. measured: where a tensor lies → the first 2-norm that was taken of it so; measured_at: how often it had been
    written to by then.
    """

    def __init__(self) -> None:
        self.norms: deque[Tensor] = deque(maxlen=NORMS)
        self.measured: dict[Where, Tensor] = {}
        self.measured_at: dict[Where, int | None] = {}
        self._place: Place = NOWHERE  # where the last one was taken
        self._written = False  # something was that may be a gradient, by whatever name
        self._factor: Tensor | None = None  # of all gradients, since their norms were taken
        self._scaled: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity, and how often they had been written to before
        self._told: dict[int, int] = {}  # and since then, when their norm was asked for

    def noted(self, call: RawCall) -> None:
        """A call that waits has taken norms, or has written to tensors."""
        if call.operator.norm:
            self.took(call.results, call.place)
            self.measure(
                [(address, math.prod(shape), version) for version, address, shape, _ in each(call.seen)], call.args[1:], call.results
            )
        elif call.results:
            self.wrote()
        else:
            self._scale(call)

    def took(self, norms: Iterable[Tensor], place: Place) -> None:
        """Norms were taken of something. place: in the trainer's code."""
        self.norms.extend(norm for norm in norms if norm.numel() <= LARGEST)
        self._place = place

    def measure(self, operands: Sequence[tuple[int, int, int | None]], rest: Sequence[Any], norms: Sequence[Tensor]) -> None:
        """Remember the norm of each of some tensors. operands: address, size, version. rest: other arguments."""
        if len(self.measured) > MEASURED:
            self.measured.clear()  # no backward pass is seen here
            self.measured_at.clear()
        if len(operands) == len(norms) and (not rest or rest[0] in (2, 2.0, None)):
            if not any((address, size) in self.measured for address, size, _ in operands):
                self._written, self._factor, self._scaled = False, None, {}  # what was written before does not matter any more
            for (address, size, version), norm in zip(operands, norms, strict=True):
                if type(norm) is Tensor and norm.numel() == 1 and (address, size) not in self.measured:
                    self.measured[address, size], self.measured_at[address, size] = norm, version

    def _scale(self, call: RawCall) -> None:
        """A list of tensors was written to: multiplied by one number after their norms were taken, or nobody knows what they are now."""
        grads, *rest = call.args
        at = [self.measured_at.get((address, math.prod(shape))) for _, address, shape, _ in each(call.seen[: EACH * len(grads)])]
        by_one = call.operator.name == "_foreach_mul_" and len(rest) == 1 and type(rest[0]) is Tensor and rest[0].numel() == 1
        again = self._written and (not by_one or rest[0] is not self._factor or any(id(grad) in self._scaled for grad in grads))
        if again or not by_one or None in at or len(set(map(id, grads))) < len(grads):
            self.wrote()
        else:  # of each dtype there is a list of its own
            self._written, self._factor = True, rest[0]
            self._scaled |= {id(grad): (weakref.ref(grad), writes or 0) for grad, writes in zip(grads, at, strict=True)}

    def wrote(self) -> None:
        """Something was written to, which may be a gradient by another name."""
        self._written, self._factor, self._scaled, self._told = True, None, {}, {}

    def norm_after(self, grads: Sequence[Tensor], before: Tensor) -> Tensor | None:
        """Return the norm of gradients, as far as any call has told, without reading them; None where that takes a reading, as where an
        optimizer asks that another one calls: what that wrote nobody has seen. before: that which was taken of them."""
        since = self._writes_since(grads)
        if self._factor is None or since not in (1, 2) or any(id(grad) in self._told for grad in grads):
            return None  # an operator on lists counts once or twice
        if any(grad.dtype is torch.float16 for grad in grads):
            return None  # their elements may overflow where a norm in float32 does not
        self._told |= {id(grad): since for grad in grads}
        return before * self._factor.abs()

    def tells(self, grads: Sequence[Tensor]) -> bool:
        """Was the norm of these gradients told without reading them, and has nobody been seen to write to them since?"""
        since = self._writes_since(grads)
        return since is not None and all(self._told.get(id(grad)) == since for grad in grads)

    def _writes_since(self, grads: Sequence[Tensor]) -> int | None:
        """How often was each of them written to after its norm was taken? None if not all as often, or if that is not known."""
        since: set[int] = set()
        for grad in grads if len(self._scaled) >= len(grads) else ():
            known, writes = self._scaled.get(id(grad), (None, 0))
            if known is None or known() is not grad:
                return None
            since.add(writes_counted(grad) - writes)
        return since.pop() if len(since) == 1 else None

    def norm_of(self, tensor: Tensor) -> Tensor | None:
        """Return the first 2-norm that was taken of a gradient."""
        part = local(tensor)
        return None if part is None or not is_plain(part) else self.measured.get((part.data_ptr(), part.numel()))

    def site(self) -> Site | None:
        """Return where the last norm was taken."""
        code, lasti = self._place
        return None if code is None else site_of(code, lasti)

    def join(self, other: Clipping) -> None:
        """Take what was measured of gradients in another thread."""
        if other.norms:
            self._place = other._place
        self.measured, other.measured = other.measured | self.measured, {}
        self.measured_at, other.measured_at = other.measured_at | self.measured_at, {}
        self.norms.extend(other.norms)
        other.norms.clear()
        self.wrote()

    def forget(self) -> None:
        """Another backward pass is over, or the step."""
        self.norms.clear()
        self.measured.clear()
        self.measured_at.clear()
        self._written, self._factor, self._scaled, self._told = False, None, {}, {}
