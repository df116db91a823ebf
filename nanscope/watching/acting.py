"""What is done about a bad step, as it was asked for: nothing but record it, or one of the three that act."""

from __future__ import annotations

from typing import Literal, get_args

OnNonFinite = Literal["record", "skip", "stop", "repair"]
ACTIONS: tuple[OnNonFinite, ...] = get_args(OnNonFinite)

MAX_REPAIRS = 100  # backward passes of a run that are repaired by default: whoever needs as many has read of it, and mends the code
