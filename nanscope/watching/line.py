"""What the history will say of the running step: gathered backward pass by backward pass, written when the step is over."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.reading import Mean, Reading
from nanscope.capture.tape import Tape
from nanscope.objective.mismatch import Mismatch
from nanscope.program.numbers import joined, norms
from nanscope.snapshot.history import Entry
from nanscope.snapshot.step import Stepped
from nanscope.watching.counts import Counts

HUGE = 1e6  # a loss in whose first steps something may be seen that is no overflow yet: an infinity that a clamp has bounded

SAME = 1e-5  # relative; a clip that did nothing


@dataclass(slots=True)
class Line:
    """One step. loss: summed over its micro-batches, without a scale against underflow. norm: of the gradients that reached the optimizer.
    before: the same before a clip, where the trainer took it. reading: of the gauge. optimizer: which one of several. room: the least that
    a call inside the models left to the end of its dtype, in bits; room_at: which one. repaired: what was done about bad gradients.
    replaced: has the loop replaced some? forecast: what was said to be about to happen."""

    loss: float | None = None
    norm: float | None = None
    before: float | None = None
    reading: Reading | None = None
    optimizer: str | None = None
    room: float | None = None
    room_at: str = ""
    repaired: list[str] = field(default_factory=list)
    replaced: bool = False
    forecast: str | None = None
    _instead: float = 0.0  # the loss with those of mended backward passes as their edits give them
    _began: float = field(default_factory=time.perf_counter)

    def add_loss(self, loss: float) -> None:
        """Another micro-batch."""
        self.loss = (self.loss or 0.0) + loss
        self._instead += loss if math.isfinite(loss) else 0.0

    def repair(self, words: str, loss: float, was: float) -> None:
        """The gradients of a backward pass were mended. loss: of the edit whose gradients they are; was: its own."""
        self.repaired.append(words)
        self._instead += loss - (was if math.isfinite(was) else 0.0)

    @property
    def taken(self) -> Stepped:
        """What became of a step that an optimizer took."""
        return Stepped.REPLACED if self.replaced else Stepped.REPAIRED if self.repaired else Stepped.TAKEN

    def add_reading(self, reading: Reading) -> None:
        """The gauge was read."""
        self.reading = reading if self.reading is None else self.reading.joined(reading)

    def add_room(self, bits: float | None, at: str) -> None:
        """The models of a deep step were asked."""
        if bits is not None and (self.room is None or bits < self.room):
            self.room, self.room_at = bits, at

    def join(self, other: Line) -> None:
        """Another thread had a part in the step."""
        if other.loss is not None:
            self.add_loss(other.loss)
            self._instead += other._instead - (other.loss if math.isfinite(other.loss) else 0.0)
        self.repaired += other.repaired
        self.replaced |= other.replaced
        if other.reading is not None:
            self.add_reading(other.reading)

    @property
    def overflowed(self) -> bool:
        """Was an exponent beyond what e may be raised to, or is the loss what no mean over tokens comes to?"""
        beyond = self.reading is not None and self.reading.headroom is not None and self.reading.headroom < 0
        return beyond or (self.loss is not None and abs(self.loss) > HUGE)

    def measure(self, grads: list[Tensor], tape: Tape, scale: object, by_hand: bool, read: bool) -> float:
        """Take the norm of the gradients that reach an optimizer, and that which the trainer's clip took before; return the first.

        scale: what the gradients of a fused optimizer are still multiplied by. by_hand: the trainer's norm may be that of scaled gradients.
        read: they are read, although a clip may have told what their norm is: nobody may have written to them unseen.
        """
        taken = [tape.clipping.measured.get((grad.data_ptr(), grad.numel())) for grad in grads if type(grad) is Tensor]
        seen = [norm for norm in taken if norm is not None]
        before = torch.linalg.vector_norm(joined(seen)) if len(seen) == len(grads) and not by_hand else None
        after = None if before is None or read else tape.clipping.norm_after(grads, before)
        if after is None or not self._tell(after, before, scale):  # a norm may overflow where no gradient has
            self._tell(torch.linalg.vector_norm(norms(grads)), before, scale)
        return float(self.norm or 0.0)

    def _tell(self, total: Tensor, before: Tensor | None, scale: object) -> bool:
        """Take both norms over in one transfer, and return whether the first is finite."""
        both = torch.stack([total, total if before is None else before]) / (scale if isinstance(scale, Tensor) else 1.0)
        self.norm, self.before = both.tolist()
        return math.isfinite(self.norm or 0.0)

    def entry(self, counts: Counts, rank: int, stepped: Stepped, bad: bool, ruined: str = "") -> Entry:
        """Return the line; the step is over. ruined: by what, where all of it stayed finite."""
        norm = self.norm if self.before is None else self.before
        clipped = self.before is not None and self.norm is not None and not _same(self.before, self.norm)
        reading = self.reading or Reading()
        return Entry(
            step=counts.number,
            rank=rank,
            time=round(time.time(), 3),
            seconds=round(time.perf_counter() - self._began, 6),
            loss=self.loss,
            grad_norm=norm,
            log_ratio_max=reading.highest,
            log_ratio_max_masked=reading.highest_masked,
            headroom=reading.headroom,
            clip_fraction=reading.clipped,
            nonfinite=bad and not ruined,
            ruined=ruined or None,
            grad_norm_clipped=self.norm if clipped else None,
            stepped=None if stepped is Stepped.TAKEN else str(stepped),
            update=counts.update if counts.update > 1 else None,
            micro_batches=counts.micro_batch if counts.micro_batch > 1 else None,
            optimizer=self.optimizer,
            headroom_bits=None if self.room is None else round(self.room, 1),
            headroom_at=self.room_at or None,
            repaired=f"{self.repaired[0]}{f'; and {more} more' if (more := len(self.repaired) - 1) else ''}" if self.repaired else None,
            repaired_loss=self._instead if self.repaired else None,
            thread=None if threading.current_thread() is threading.main_thread() else threading.current_thread().name,
            log_ratio_min=reading.lowest,
            log_ratio_min_masked=reading.lowest_masked,
            kl=_value(reading.kl),
            kl_old=_value(reading.kl_old),
            entropy=_value(reading.entropy),
            forecast=self.forecast,
            **_mismatch(reading.mismatch),
        )


def _value(mean: Mean | None) -> float | None:
    return None if mean is None else mean.value


def _mismatch(found: Mismatch | None) -> dict[str, Any]:
    """What a line says of the mismatch between the sampler and the trainer."""
    if found is None:
        return {}
    return {
        "mismatch_mean": found.mean,
        "mismatch_max": found.largest,
        "mismatch_k1": found.k1,
        "mismatch_k3": found.k3,
        "mismatch_beyond": found.share_beyond,
        "mismatch_far": found.share_far,
        "mismatch_ess": found.sample_size,
        "mismatch_dropped": found.share_dropped,
        "mismatch_cut": found.share_cut,
        "mismatch_unscored": int(found.unscored) or None,
    }


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME) or (math.isnan(a) and math.isnan(b))
