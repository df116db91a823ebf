"""What a bad step has left in a tensor that goes on: a running mean, an average, a baseline. Every later step that reads it meets the same
element, whatever its own batch is."""

from __future__ import annotations

from nanscope.text import line_in
from nanscope.watching.look import Look


class CarriedOn:
    """The elements at which the steps of a run went wrong."""

    def __init__(self) -> None:
        self._met: dict[tuple[int, int], tuple[int, int]] = {}  # value and position → step, and the first id that was free after it

    def since(self, step: int, look: Look) -> tuple[int, str] | None:
        """Return the earlier step that met the element at which this one went wrong, and in words what has kept it since then; None if it
        is new."""
        if look.location is None or look.second:
            return None  # numbered by another tape
        origin, chain = look.location.origin, look.location.chain
        since, free = self._met.setdefault((origin.value_id, origin.flat), (step, look.program.new_id()))
        if since == step:
            return None
        kept = next((link for link in reversed(chain) if link.value_id < free and not link.backward), None)
        name = None if kept is None else kept.variable
        where = f" ({line_in(kept.file, kept.line)})" if kept is not None and kept.file and kept.line else ""
        return since, f"{name or 'a tensor'}{where} is non-finite since step {since}, and is carried on from step to step"
