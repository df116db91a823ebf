"""The gradients that a step is taken on: are they finite, all zero, or far from the size that this run is used to?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nanscope.capture.failsafe import Failsafe
from nanscope.program.numbers import count_bad
from nanscope.snapshot.observation import UNMADE
from nanscope.snapshot.step import Reached
from nanscope.watching.course import Course
from nanscope.watching.examine import Examiner
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.oddities import Sizes
from nanscope.watching.optimizers import updated_by
from nanscope.watching.readable import readable


class Gradients:
    """Asked before an optimizer steps, and where none comes."""

    def __init__(self, keeper: Keeper, examiner: Examiner, logbook: Logbook, failsafe: Failsafe) -> None:
        self._keeper, self._examiner, self._logbook, self._failsafe = keeper, examiner, logbook, failsafe

    @property
    def _course(self) -> Course:
        return self._keeper.course

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters that it is about to step on, and their gradients as this process can read them."""
        return self._there(updated_by(optimizer))

    def judge(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], grads: list[Tensor], total: float) -> None:
        """An optimizer is about to step on these. total: their norm. Raises NonFiniteError if training is to end."""
        replaced, fine = self._examiner.tape.replacing.take(), math.isfinite(total) or not count_bad(grads)  # a norm may be infinite alone
        if replaced and fine and self._course.recordings.made:
            self._course.line.replaced = True
            self.were_bad(max(replaced, len(grads)), replaced)
        elif total == 0 and not self._course.bad:
            self._failsafe("clip-hit", self._look_at_zeros, grads)
        elif fine:
            self.look_for_spikes(optimizer, total)
        else:
            self.are_bad(parameters, grads)

    def are_bad(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        """Some are not finite. Raises NonFiniteError if training is to end."""
        if not self._course.recordings.made:
            # Nobody differentiated anything here: gradients set by hand, or by a backward pass before the block.
            self._course.foreign = True
            if not self._course.bad:
                self._failsafe("gradient-hit", self._keep_unmade, parameters, grads)
            last = self._logbook.snapshots[-1] if self._logbook.snapshots else None
            if last is None or last.found.origin.op == UNMADE:  # else the code has differentiated by itself, and that was seen
                text = "an optimizer stepped on non-finite gradients that no backward pass in the watched block made"
                self._logbook.note("foreign_gradients", text, self._course.counts.number)
        elif not self._course.bad:
            self.keep(parameters, grads)
        self._mark(len(grads), count_bad(grads))
        self._keeper.stop_if_asked()

    def were_bad(self, total: int, bad: int) -> None:
        """So many of them were not finite, and are gone: a hook has taken them, or the loop has put others in their place."""
        if not self._course.bad:
            self.keep()
        self._mark(total, bad)

    def overwritten(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made weights non-finite: was it the gradients, which nobody had read since a clip told their norm?"""
        parameters, grads = self.of(optimizer)
        if self._course.recordings and self._examiner.tape.clipping.tells(grads) and count_bad(grads):
            self._course.line.norm = math.nan  # and not what the clip had left
            hit = self._examiner.overwritten(self._course.recordings[-1], parameters, grads)
            self._failsafe("gradient-hit", self._keeper.keep, hit)
            self._mark(len(grads), count_bad(grads))

    def keep(self, parameters: Sequence[nn.Parameter] = (), grads: Sequence[Tensor] = ()) -> None:
        """Gradients of the step are bad, and nothing that was seen of it said so before. grads: those that are still there."""
        recordings = self._course.recordings
        self._failsafe("gradient-hit", lambda: self._keeper.keep(self._examiner.gradients(recordings, parameters, grads)))
        self._keeper.note_gone()

    def look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nobody else does: no optimizer came, or a scaler that skips every step."""
        there, grads = self._there(parameters)
        if count_bad(grads):
            self.keep(there, grads)

    def look_for_spikes(self, optimizer: torch.optim.Optimizer, total: float) -> None:
        """Everything is finite: is it also of the size that this optimizer is used to?"""
        if not self._course.bad:
            self._failsafe("spike", self._compare, optimizer, total)

    def _compare(self, optimizer: torch.optim.Optimizer, total: float) -> None:
        recordings, line = self._course.recordings, self._course.line
        sizes = self._course.sizes.setdefault(optimizer, Sizes())
        seen = abs(line.loss or 0.0), max(total, line.before or 0.0)
        scale = sizes.out_of_scale(*seen)
        hit = None
        if scale and recordings:
            hit = self._examiner.spike(max(recordings, key=lambda recording: abs(recording.value or 0.0)), scale)
        if hit is not None:
            self._keeper.keep(hit)
        else:
            sizes.add(*seen)

    def _there(self, parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[Tensor]]:
        there = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        return [parameter for parameter, _ in there], readable([grad for _, grad in there], "gradients", self._logbook.gap)

    def _mark(self, total: int, bad: int) -> None:
        self._keeper.unexplained()
        self._failsafe("mark", self._keeper.mark_gradients, total, bad)

    def _keep_unmade(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        self._keeper.save(None, Reached(), self._examiner.taken(parameters, grads))

    def _look_at_zeros(self, grads: list[Tensor]) -> None:
        if self._course.recordings:
            self._keeper.keep(self._examiner.clip(self._course.recordings[-1], grads))
