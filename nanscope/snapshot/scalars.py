"""The line of a step as named numbers, for whoever draws curves: trackers, and the trainer's own log.

{"nanscope/headroom_nats": 61.2, "nanscope/log_ratio_max": 27.5, "nanscope/kl": 0.003, "nanscope/bad_steps": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nanscope.snapshot.history import Entry

PREFIX = "nanscope/"
BAD_STEPS = "bad_steps"
FIRST_BAD_STEP = "first_bad_step"


def _worst(of: Callable[[Iterable[float]], float]) -> Callable[[list[float]], float]:
    return lambda values: math.nan if any(map(math.isnan, values)) else of(values)


highest, lowest = _worst(max), _worst(min)


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


# field of an Entry, name where that is another, what several steps come to
SCALARS: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("loss", "loss", mean),  # as it was differentiated: a trainer's own log may filter it
    ("repaired_loss", "repaired_loss", mean),
    ("grad_norm", "grad_norm", highest),
    ("headroom", "headroom_nats", lowest),
    ("headroom_bits", "headroom_bits", lowest),
    ("log_ratio_max", "log_ratio_max", highest),
    ("log_ratio_max_masked", "log_ratio_max_masked", highest),
    ("log_ratio_min", "log_ratio_min", lowest),
    ("log_ratio_min_masked", "log_ratio_min_masked", lowest),
    ("clip_fraction", "clip_fraction", mean),
    ("kl", "kl", mean),
    ("kl_old", "kl_old", mean),
    ("entropy", "entropy", mean),
    ("mismatch_mean", "mismatch_mean", mean),
    ("mismatch_max", "mismatch_max", highest),
    ("mismatch_k1", "mismatch_k1", mean),
    ("mismatch_k3", "mismatch_k3", mean),
    ("mismatch_beyond", "mismatch_beyond", mean),
    ("mismatch_far", "mismatch_far", mean),
    ("mismatch_ess", "mismatch_ess", lowest),
    ("mismatch_dropped", "mismatch_dropped", mean),
    ("mismatch_cut", "mismatch_cut", mean),
    ("mismatch_unscored", "mismatch_unscored", highest),
)
FOLD: Mapping[str, Callable[[list[float]], float]] = {name: fold for _, name, fold in SCALARS} | {
    BAD_STEPS: highest,
    FIRST_BAD_STEP: highest,
}


@dataclass(slots=True)
class Scalars:
    """The lines of a run as they come. bad_steps: so far; first: which one was the first of them."""

    bad_steps: int = 0
    first: int | None = None

    def of(self, entry: Entry) -> dict[str, float]:
        """Return the numbers of a line, under the names of its process and its optimizer where there are several."""
        if entry.bad:
            self.bad_steps += 1
            self.first = entry.step if self.first is None else self.first
        numbers = {name: float(value) for key, name, _ in SCALARS if (value := getattr(entry, key)) is not None}
        numbers[BAD_STEPS] = float(self.bad_steps)
        if self.first is not None:
            numbers[FIRST_BAD_STEP] = float(self.first)
        who = "".join(f"{part}/" for part in (_process(entry), (entry.optimizer or "").replace("/", "_")) if part)
        return {f"{PREFIX}{who}{name}": value for name, value in numbers.items()}


def folded(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return what several lines come to: of each number its extreme or its mean, in the order in which the names came."""
    gathered: dict[str, list[float]] = {}
    for scalars in several:
        for name, value in scalars.items():
            gathered.setdefault(name, []).append(value)
    return {name: FOLD.get(name.rpartition("/")[2], mean)(values) for name, values in gathered.items()}


def _process(entry: Entry) -> str:
    rank = f"rank{entry.rank}" if entry.rank else ""
    return ".".join(part for part in (rank, (entry.worker or "").replace("/", "_")) if part)
