"""What went bad in a loss and did no harm: worth a word, once for each line."""

from __future__ import annotations

from nanscope.verdict.sentence import absorbed
from nanscope.watching.examine import Examiner
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording

FRUITLESS = 8


class Absorbed:
    """Notes it, or, where hooks kept it from the weights, that nobody knows."""

    def __init__(self, examiner: Examiner, logbook: Logbook) -> None:
        self._examiner, self._logbook = examiner, logbook
        self._told: set[tuple[str, int]] = set()
        self._fruitless = 0  # searches in a row that found nothing: a loss may be large in every step of a healthy run

    def note(self, recording: Recording, step: int) -> None:
        """A value overflowed, or a gradient was not finite and did not arrive."""
        vanished = self._examiner.vanished(recording)
        if vanished is not None and vanished[1]:
            text = f"what the gradient of {vanished[0]} would have done to the weights: it was not finite, and hooks let nothing through"
            self._logbook.gap("hidden-by-hook", text, step)
        location = self._examiner.absorbed(recording) if self._logbook.takes_notes() and self._fruitless < FRUITLESS else None
        self._fruitless = 0 if location is not None else self._fruitless + 1
        if location is None or location.origin.site is None:
            if vanished is not None and not vanished[1]:
                text = f"the gradient of {vanished[0]} was not finite, and nothing of that arrived in a weight"
                self._logbook.note("nonfinite_absorbed", text, step)
            return
        line = (location.origin.site.file, location.origin.site.line)
        if line not in self._told:
            self._told.add(line)
            self._logbook.note("nonfinite_absorbed", absorbed(location, step), step)
