"""Which bad steps are only consequences: the weights were non-finite when they began, since an earlier step of the run.

A step is one if what was seen of it says so. Once one was looked at, and as long as those weights stay bad, a step whose loss is fed
non-finite values by the model is one, too, and nobody looks at it again.
"""

from __future__ import annotations

from dataclasses import replace

from nanscope.program.numbers import is_finite
from nanscope.snapshot.observation import Observation, Phase
from nanscope.snapshot.record import Aftermath
from nanscope.watching.recording import Recording

FED = frozenset({"module", "unknown"})  # an origin that nobody could look into: it came out of the model


class Poisoning:
    """Since when the weights are bad. aftermath: the consequences of each step that made them so."""

    def __init__(self) -> None:
        self.aftermath: list[Aftermath] = []
        self._since: int | None = None
        self._confirmed = False

    def weights(self, step: int, bad: int) -> None:
        """After the update of a step, so many weights were non-finite."""
        if not bad:
            self._since, self._confirmed = None, False
        elif self._since is None:
            self._since = step

    def explains(self, step: int, recording: Recording | None, looking: bool) -> int | None:
        """Return the step of which a further bad one is surely a consequence. looking: there is still room to look at it closely."""
        if self._since is None or self._since >= step or (looking and not self._confirmed) or recording is None:
            return None
        fed = [recording.tensors[leaf.id] for leaf in recording.program.leaves if leaf.diff] if recording.program is not None else []
        return self._since if not fed or not all(bool(is_finite(tensor)) for tensor in fed) else None

    def of(self, step: int, seen: Observation) -> int | None:
        """Return the step of which one that was looked at is a consequence, None if it has a cause of its own."""
        if self._since is None or self._since >= step or (seen.phase is not Phase.WEIGHTS and seen.origin.op not in FED):
            return None
        self._confirmed = True
        return self._since

    def add(self, step: int, of: int) -> None:
        """Count a consequence."""
        known = self.aftermath[-1] if self.aftermath and self.aftermath[-1].of == of else None
        if known is None:
            self.aftermath.append(Aftermath(of, step, step, 1))
        else:
            self.aftermath[-1] = replace(known, last=step, count=known.count + 1)
