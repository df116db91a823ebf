"""Did the recorded step come out again? Loss and gradients apart, bit for bit or how far off.

reproduces bit for bit
loss reproduces bit for bit                  no gradient was kept to compare with
loss bit for bit, gradients within 3e-07
loss within 2e-08, gradients within 4e-06 (recorded on NVIDIA H100, replayed on the CPU: other kernels add in another order)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanscope.plain import show
from nanscope.program.numbers import same_bits
from nanscope.snapshot.step import Snapshot


@dataclass(frozen=True, slots=True)
class Reproduction:
    """How far a replay is from what was recorded, relative to the largest recorded number.

    loss, gradients: 0 if bit for bit, infinite where one is finite and the other is not, None if there is nothing to compare with.
    rounding: what the recorded dtype explains. device: where it was recorded, "" if it was replayed there.
    """

    loss: float | None = None
    gradients: float | None = None
    rounding: float = 0.0
    device: str = ""

    @staticmethod
    def of(snapshot: Snapshot, loss: Tensor, grads: Mapping[int, Tensor]) -> Reproduction:
        """Compare a run of a snapshot's program, its loss and the gradients of its leaves, with what the file holds."""
        if snapshot.loss is None:
            return NOT_COMPARED
        kept = [_off(grads[leaf], grad) if leaf in grads else math.inf for leaf, grad in snapshot.grads.items()]
        dtypes = [tensor.dtype for tensor in (snapshot.loss, *snapshot.grads.values()) if tensor.is_floating_point()]
        rounding = max((torch.finfo(dtype).eps ** 0.5 for dtype in dtypes), default=0.0)
        device = str(snapshot.environment.get("device") or "cpu")
        here = device == "cpu" or loss.device.type != "cpu"
        return Reproduction(_off(loss, snapshot.loss), max(kept, default=None), rounding, "" if here else device)

    @property
    def holds(self) -> bool | None:
        """Did the loss come out again, bit for bit or but for rounding? None if there is nothing to compare with."""
        return None if self.loss is None else self.loss <= self.rounding

    @property
    def exact(self) -> bool | None:
        """Did all that was kept come out again bit for bit?"""
        return None if self.loss is None else not self.loss and not self.gradients

    @property
    def words(self) -> str:
        """What came out again, "" if there is nothing to compare with."""
        if self.loss is None:
            return ""
        if not self.holds:
            return "does not reproduce"
        if self.exact:
            return "reproduces bit for bit" if self.gradients is not None else "loss reproduces bit for bit"
        parts = [f"{name} {_words(off)}" for name, off in (("loss", self.loss), ("gradients", self.gradients)) if off is not None]
        why = f" (recorded on {self.device}, replayed on the CPU: other kernels add in another order)" if self.device else ""
        return ", ".join(parts) + why

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data, with its words."""
        return {"loss": show(self.loss), "gradients": show(self.gradients), "exact": self.exact, "words": self.words}


NOT_COMPARED = Reproduction()


def _words(off: float) -> str:
    if not off:
        return "bit for bit"
    return f"within {off:.0e}" if off < 0.1 else f"off by {100 * off:.0f} %" if math.isfinite(off) else "not finite in the same places"


def _off(found: Tensor, recorded: Tensor) -> float:
    """Return the largest difference, relative to the largest recorded number: 0 if bit for bit, infinite if they are not alike."""
    recorded = recorded.to(found.device)
    if same_bits(found, recorded):
        return 0.0
    if found.shape != recorded.shape:
        return math.inf
    got, wanted = found.detach().double(), recorded.detach().double()
    finite = torch.isfinite(wanted)
    alike = torch.equal(torch.nan_to_num(got[~finite]), torch.nan_to_num(wanted[~finite])) and bool(torch.isfinite(got[finite]).all())
    if not alike or not bool((torch.isnan(got) == torch.isnan(wanted)).all()):
        return math.inf
    difference = (got[finite] - wanted[finite]).abs().max() if bool(finite.any()) else torch.zeros(())
    scale = float(wanted[finite].abs().max()) if bool(finite.any()) else 0.0
    return float(difference) / scale if scale > 0 else float(difference)
