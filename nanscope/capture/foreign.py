"""Which code is not the trainer's own: it keeps nothing of his, and there is too much of it to look into."""

from __future__ import annotations

import sys

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "nanscope", "triton"})


def is_foreign(module: str) -> bool:
    """Is a Python module one of the language's, of torch or of ours?"""
    return module.partition(".")[0] in _FOREIGN
