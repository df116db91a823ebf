"""What the trainer measures of gradients before it clips them: the norms that it takes without gradient, of which tensors, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from nanscope.capture.notes import RawCall
from nanscope.capture.sites import NOWHERE, Place
from nanscope.capture.source import site_of
from nanscope.program.calls import Site
from nanscope.program.local import is_plain, local

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

    def noted(self, call: RawCall) -> None:
        """A norm was taken by a call that waits."""
        self.took(call.results, call.place)
        self.measure([(address, shape.numel(), version) for version, address, shape, _ in call.seen], call.args[1:], call.results)

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
            for (address, size, version), norm in zip(operands, norms, strict=True):
                if type(norm) is Tensor and norm.numel() == 1 and (address, size) not in self.measured:
                    self.measured[address, size], self.measured_at[address, size] = norm, version

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

    def forget(self) -> None:
        """Another backward pass is over, or the step."""
        self.norms.clear()
        self.measured.clear()
        self.measured_at.clear()
