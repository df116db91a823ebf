"""What a fault did to a loss and its gradient, as a set of letters.

`L` the loss is not finite, `V` a gradient at a counted token is not, `M` the gradient at a masked token is not, `≠` the loss is finite and
yet another number than it should be, `·` none of these. `M` is no trifle: the masked token's gradient flows into the same weights as all
others, so one step makes every parameter NaN while the loss still looks healthy.
"""

from __future__ import annotations

from enum import Flag, auto


class Harm(Flag):
    """What a fault did. The empty flag is clean."""

    CLEAN = 0
    LOSS = auto()  # not finite
    CHANGED = auto()  # finite, and not what it should be
    VALID = auto()  # a gradient at a counted token is not finite
    MASKED = auto()  # a gradient at a masked token is not finite

    @property
    def code(self) -> str:
        """Return the letters, `·` for none."""
        return "".join(letter for harm, letter in LETTERS.items() if harm in self) or "·"

    @property
    def silent(self) -> bool:
        """Return whether the gradient is not finite although the loss is: a curve of the loss shows nothing."""
        return bool(self & GRADIENT) and Harm.LOSS not in self


LETTERS = {Harm.LOSS: "L", Harm.CHANGED: "≠", Harm.VALID: "V", Harm.MASKED: "M"}  # in the order in which they are written

GRADIENT = Harm.VALID | Harm.MASKED

LEGEND = {
    "·": "clean",
    "L": "the loss is not finite",
    "V": "a gradient at a counted token is not finite",
    "M": "the gradient at a masked token is not finite",
    "≠": "the loss is finite but wrong: a masked token or an empty row changed it, or a counted NaN or −inf vanished",
}
