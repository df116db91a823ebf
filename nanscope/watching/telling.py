"""What is said on the log while a run goes on: one line for each origin, when it is found.

nanscope [bad-step]: step 412: ratio = torch.exp(log_ratio) overflowed to +inf at row 2, token 27 ([2, 27] of [4, 64]), loss.py:206:
exp(89.05) = +inf, float32 ends at exp(88.72); next: nanscope replay nanscope-runs/2026-11-21T20-15-03-train/step-000412.rank0.safetensors

nanscope [forecast]: step 38: ref_log_ratio at masked tokens gains 1.6 nats a step: at this pace exp overflows in about 12 steps …

Later steps with the same origin are counted: at the 1st, 10th, 100th, … more, and when the run ends.
"""

from __future__ import annotations

import logging

import torch

from nanscope.errors import visible
from nanscope.foresight.hazard import Check
from nanscope.snapshot.step import Snapshot
from nanscope.text import is_round, line_in
from nanscope.torch_inside import LACKS
from nanscope.verdict.forecast import Forecast
from nanscope.verdict.sentence import what_and_where

log = logging.getLogger("nanscope")

LINE = "nanscope [bad-step]: %s"

HAZARDS = 3  # of a check that have a line of their own on the log

NOT_SEEN = "the loss, a gradient or a weight is not finite"

UNSAVED = "other"  # steps that were counted and not looked at


def tell_lacks() -> None:
    """Say what comes of the names that this release of torch lacks, in one line for each consequence."""
    for so in dict.fromkeys(lack.so for lack in LACKS):
        names = ", ".join(lack.name for lack in LACKS if lack.so == so)
        log.warning("nanscope [torch-lacks]: torch %s has no %s: %s", torch.__version__, names, so)


def _say(line: str, text: str) -> None:
    """A line on the log, in which a name of a file or of a variable commands no terminal."""
    log.warning(line, visible(text))


class Teller:
    """Says what is found, once. process: said with it where there are several; directory: of the run, where the rest is found."""

    def __init__(self, directory: str | None = None, process: str = "") -> None:
        self.directory, self.process = directory, process
        self._more: dict[object, tuple[str, int, int]] = {}  # origin → what it is called, how many more, how many of them were told

    def found(self, snapshot: Snapshot, path: str | None, left: bool = False) -> None:
        """A bad step was looked at, and written if it could be. left: to other ranks."""
        seen = snapshot.found
        site: object = snapshot.carried_on or (seen.origin.file, seen.origin.line, seen.origin.variable, seen.kind)
        if site in self._more:
            self._count(site)
            return
        known = seen.origin.file is not None and snapshot.carried_on is None
        place = f"at {line_in(seen.origin.file or '', seen.origin.line)}" if known else f"of step {snapshot.step}"
        self._more[site] = (f"like that {place}", 0, 0)
        step = f"{snapshot.place} on {self.process}" if self.process else snapshot.place
        if snapshot.consequence_of is not None:
            since = snapshot.carried_on or f"the weights are non-finite since step {snapshot.consequence_of}"
            what_next = f"{since}; what follows from it is counted"
            _say(LINE, f"{step}: {what_next}")
            return
        next_ = f"next: nanscope replay {path}" if path is not None else "it is not on disk, only in memory"
        next_ = f"other ranks write it: nanscope report {self.directory}" if left else next_
        _say(LINE, f"{step}: {what_and_where(snapshot) if seen.phase is not None else NOT_SEEN}; {next_}")

    def forecast(self, forecast: Forecast) -> None:
        """Something is about to happen."""
        step = f"step {forecast.step} on {self.process}" if self.process else f"step {forecast.step}"
        saved = f"; saved {forecast.snapshot}" if forecast.snapshot is not None else ""
        _say("nanscope [forecast]: %s", f"{step}: {forecast.sentence}{saved}")

    def checked(self, check: Check, path: str | None) -> None:
        """A loss was asked what would kill it: the answer in a line, one for each of the first hazards that training can reach, and one for
        what could not be tried."""
        step = f"step {check.step} on {self.process}" if self.process else f"step {check.step}"
        next_ = "" if path is None else f"; next: nanscope check {path}"
        _say("nanscope [check]: %s", f"{step}: {check.sentence.rstrip('.')}{next_}")
        for hazard in check.reachable[:HAZARDS]:
            _say("nanscope [check]: %s", hazard.words)
        if check.fixed:
            _say("nanscope [check]: %s", f"settled: {'; '.join(check.fixed[:HAZARDS])}")

    def unsaved(self) -> None:
        """A bad step was counted, and neither looked at nor written."""
        self._more.setdefault(UNSAVED, ("not saved", 0, 0))
        self._count(UNSAVED)

    def unheard(self, who: str) -> None:
        """The run has ended here, and not on other ranks. who: has not reported, in words."""
        _say("nanscope [not-heard-of]: %s", f"{who}; when all have: nanscope report {self.directory}")

    def end(self) -> None:
        """Say what was counted since it was last told."""
        for origin in self._more:
            self._tell(origin)

    def _count(self, origin: object) -> None:
        words, count, told = self._more[origin]
        self._more[origin] = (words, count + 1, told)
        if is_round(count + 1):
            self._tell(origin)

    def _tell(self, origin: object) -> None:
        words, count, told = self._more[origin]
        if count > told:
            self._more[origin] = (words, count, count)
            where = f"; nanscope report {self.directory}" if self.directory is not None else ""
            _say(LINE, f"so far {count} more bad step{'' if count == 1 else 's'} {words}{where}")
