"""The faults of the atlas: one kind of number, at one place of one tensor, under one sign of the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class FaultKind(StrEnum):
    """What is put into the batch."""

    NEGATIVE_INFINITY = "−inf"
    NAN = "NaN"
    PLUS = "+200"  # nat: the log-ratio that the tensor stands in; exp overflows above 88.72 in float32
    MINUS = "−200"
    EMPTY = "empty"  # no valid token


class Where(StrEnum):
    """Where it is put."""

    MASKED = "masked"
    VALID = "valid"
    ROW = "row"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: a kind, at one place of one tensor, under one sign of the advantage.

    tensor:    field of `LossInputs`; the mask for rows and batches without a valid token.
    advantage: sign of A in the faulty row, 1, −1 or 0.
    """

    tensor: str
    kind: FaultKind
    where: Where
    advantage: int = 1

    @property
    def name(self) -> str:
        """Return `old +200 masked A>0`."""
        if self.kind is FaultKind.EMPTY:
            return f"empty {self.where}"
        return f"{SHORT[self.tensor]} {self.kind} {self.where} A{'<=>'[self.advantage + 1]}0"

    @property
    def sets(self) -> str:
        """Return what exactly is set in the batch."""
        if self.kind is FaultKind.EMPTY:
            return f"mask := 0 in {'the faulty row' if self.where is Where.ROW else 'every row'}"
        if self.kind not in LOG_RATIO:
            return f"{self.tensor} := {self.kind}"
        base, sign, ratio = STANDS_IN[self.tensor]
        step = "+" if sign * LOG_RATIO[self.kind] > 0 else "−"
        return f"{self.tensor} := {base} {step} 200, so that {ratio} = {self.kind}"


SHORT = {
    "log_probs": "policy",
    "old_log_probs": "old",
    "ref_log_probs": "ref",
    "rollout_log_probs": "rollout",
    "entropy": "entropy",
    "mask": "mask",
}

LOG_RATIO = {FaultKind.PLUS: 200.0, FaultKind.MINUS: -200.0}
CONSTANT = {FaultKind.NEGATIVE_INFINITY: float("-inf"), FaultKind.NAN: float("nan")}
# tensor: (what it is set against, the sign with which it enters its log-ratio, that log-ratio)
STANDS_IN = {
    "log_probs": ("old_log_probs", 1.0, "log_ratio = policy − old"),
    "old_log_probs": ("log_probs", -1.0, "log_ratio = policy − old"),
    "ref_log_probs": ("log_probs", 1.0, "ref − policy"),
    "rollout_log_probs": ("old_log_probs", -1.0, "old − rollout"),
}

FAULTS: tuple[Fault, ...] = (
    *(
        Fault(tensor, kind, where, sign)
        for where, tensor, kind, sign in product(
            (Where.MASKED, Where.VALID),
            STANDS_IN,
            (FaultKind.NEGATIVE_INFINITY, FaultKind.NAN, FaultKind.PLUS, FaultKind.MINUS),
            (1, -1),
        )
    ),
    *(Fault("old_log_probs", FaultKind.PLUS, where, 0) for where in (Where.MASKED, Where.VALID)),  # a group whose rewards are all alike
    *(Fault("entropy", FaultKind.NAN, where) for where in (Where.MASKED, Where.VALID)),
    Fault("mask", FaultKind.EMPTY, Where.ROW),
    Fault("mask", FaultKind.EMPTY, Where.BATCH),
)
