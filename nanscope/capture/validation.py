"""What a distribution of torch's asks of its parameters before it takes them: it refuses NaN in Python, and a loop may catch that."""

from __future__ import annotations

import sys
from types import TracebackType

from torch import Tensor
from torch.distributions import Distribution

_ASKS = Distribution.__init__.__code__
_OURS = __name__.partition(".")[0] + "."


def refused_parameter() -> tuple[str, Tensor] | None:
    """Return the parameter that is about to be refused, where a distribution is who was just answered no; None where somebody else is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame.f_code is not _ASKS:
        return None
    name, value = (frame.f_locals.get(one) for one in ("param", "value"))
    return (name, value) if isinstance(name, str) and isinstance(value, Tensor) else None


def is_refusal(error: BaseException) -> bool:
    """Was an exception raised by such a distribution?"""
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code is _ASKS
