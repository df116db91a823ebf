"""Two steps, or two runs, beside each other: where they part, and by how much."""

from nanscope.compare.steps import compare

__all__ = ["compare"]
