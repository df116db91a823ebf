"""What an incident states: the answers that are right by the mechanism of its script, whatever any tool says of it.

    EXPECTED = Expected(
        phase=("forward",),
        cause=("exp_overflow",),
        op=("exp",),
        index=(2, 1),
        masked=False,
        role=("is_weight", "advantages", "ratio"),
        fix=("clamp_exponent",),
        variable=("w",),
        line=("w = gain.exp()",),
    )

A tuple holds every answer that is fair, the best one first. Everything that is stated is compared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right answers about the first harmful value of a script.

    phase:    where it was made: input, forward, backward, optimizer, weights.
    cause:    why; the causes of which the first is the best also hold that no rule is idle.
    op:       the operator that made it, as torch or as the script calls it; any for an input or a weight.
    index:    where it stands in its tensor; () of a scalar, None if nothing is stated. Not compared of a weight.
    masked:   does the loss leave the element out? None if nothing is stated.
    role:     what the tensor means in the training.
    fix:      the class of the change that helps.
    variable: the name that the script binds this value to, of an input its key or name, of a weight its full name. None among the answers:
              the value has no name, and none may be given (in `y = -torch.log(x)` the logarithm has none: y is its negative).
    line:     text of the source line, stripped, that holds the call that made it; of an input or a weight the call that first reads it, or
              that made it of plain numbers. None among the answers: no line of the script does, and none may be named.
    """

    phase: tuple[str, ...]
    cause: tuple[str, ...]
    op: tuple[str, ...]
    index: tuple[int, ...] | None
    masked: bool | None
    role: tuple[str, ...]
    fix: tuple[str, ...]
    variable: tuple[str | None, ...]
    line: tuple[str | None, ...]
