"""What the values of a script are called: as the code calls them, if that is a plain name, else by what they mean, else by what makes them.

Names come out of a file, which may be hostile: only an ASCII identifier of moderate length passes that is no keyword, no builtin, and no
name that the script itself needs.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Container

from nanscope.locate.names import Names
from nanscope.program.program import Program
from nanscope.roles import Role, last_word

LONGEST = 40  # characters
# What the script uses for itself.
OWN = frozenset(("torch", "pytest", "loss_of", "leaf", "part", "nan", "inf", "self", "cls", "annotations"))
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_RESERVED = frozenset(dir(builtins)) | frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | OWN

# What people call what an operator makes.
_MADE: dict[str, str] = {
    "add": "total",
    "sub": "difference",
    "rsub": "difference",
    "mul": "product",
    "div": "quotient",
    "sum": "total",
    "max": "largest",
    "amax": "largest",
    "min": "smallest",
    "amin": "smallest",
    "maximum": "larger",
    "minimum": "smaller",
    "pow": "power",
    "abs": "magnitude",
    "neg": "negated",
    "gather": "picked",
    "index": "picked",
    "where": "chosen",
    "masked_fill": "filled",
    "_to_copy": "cast",
    "_softmax": "probs",
    "_log_softmax": "log_probs",
    "clamp": "clamped",
}


class Remembered:
    """What the values of a shrunk program were called when it was whole: where calls are gone, others look like what they are not.

    before: the names in the whole program, for what was in it; now: those in the program as it is.
    """

    def __init__(self, before: Names, known: Container[int], now: Names) -> None:
        self._before, self._known, self._now = before, known, now

    def name(self, value: int) -> str | None:
        """Return the variable a value is bound to."""
        return (self._before if value in self._known else self._now).name(value)

    def role(self, value: int) -> Role | None:
        """Return what a value means."""
        return (self._before if value in self._known else self._now).role(value)


def plain_name(text: str | None) -> str | None:
    """Return a name as a script may use it, None if it is none, or could be anything else than a name."""
    if not text or len(text) > 4 * LONGEST:
        return None
    word = last_word(text)
    if len(word) > LONGEST or not _PLAIN.fullmatch(word) or not word.isidentifier() or word in _RESERVED or "__" in word:
        return None
    return word


def own_name(names: Remembered, value: int) -> str | None:
    """Return what the code calls a value, None where it has no plain name for it."""
    return plain_name(names.name(value))


def fallback(program: Program, names: Remembered, value: int) -> str:
    """Return a name for what the code does not name."""
    leaf, made = program.leaf(value), program.maker(value)
    role = names.role(value)
    if leaf is not None:
        return str(role) if role in set(Role) else "x"
    operator = made.name.strip("_") if made is not None else ""
    return _MADE.get(made.name if made is not None else "", "") or plain_name(operator) or "value"
