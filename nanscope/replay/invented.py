"""What an edit makes up, where it puts a number of ours in the place of one that came in bad.

advantages[5] = 0     completion 5 has no part in the gradient any more, and the others are as they were
rewards[5] = 0        the mean and the deviation of its group are of a reward that nobody gave, and all of the group trains with them
returns[5] = 0        the critic is pulled to a return that nobody had
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nanscope.program.ops import CLAMPS, COMPARISONS, MEANS, PRODUCTS, QUOTIENTS, REPLACEMENTS, SUMS, carries
from nanscope.program.program import Program
from nanscope.replay.reference import Healthy

INVENTED = "trains with a number that nobody gave: leave the sample out before anything is made of it"


def invents(program: Program, value: int | None, grads: Mapping[int, Tensor], healthy: Healthy | None, counts: bool) -> bool:
    """Is something trained with the 0 that takes the place of bad elements of a value? grads: with it. counts: the loss counts them.

    Not where all elements that depend on them are left without a gradient, nor where a 0 takes out their part, and nothing else. Of what
    the loss counts a gradient of 0 is no sign: it may be that of a clip, which has another side.
    """
    masks = {} if healthy is None else healthy.masks
    left = (bool(((grad != 0) & ~masks[leaf] if leaf in masks else grad).any()) for leaf, grad in grads.items())
    if value is None:
        return any(left)
    return (counts or any(left)) and not _is_a_factor(program, value)


def _is_a_factor(program: Program, value: int) -> bool:
    """Is all that is made of a value a product with it? A sum that is divided by counts what it is made of, and of that a 0 is none."""
    waiting, seen = [(value, False)], {value}
    while waiting:
        current, summed = waiting.pop()
        for reader in program.readers(current):
            inputs = list(reader.inputs())
            if reader.name in PRODUCTS or (reader.name in QUOTIENTS and (summed or inputs[0] == current)):
                continue
            adds_up = reader.name in SUMS - MEANS
            if not (adds_up or carries(reader.op) or reader.name in CLAMPS | COMPARISONS | REPLACEMENTS - MEANS or reader.name == "neg"):
                return False
            fresh = [out for out in reader.outs if out is not None and out not in seen]
            seen.update(fresh)
            waiting += [(out, summed or adds_up) for out in fresh]
    return True
