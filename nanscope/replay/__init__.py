"""The recorded step again, changed: edits of its program, and other losses on its batch.

    nanscope.replay("step-000412.rank0.safetensors", "clamp:20")

Notable: the room has the name of its verb. Python makes a package an attribute of the one that it lies in as soon as a file of it is
imported, so that a function of this name would be there until then, and gone afterwards. So the room itself can be called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanscope.replay.tries import Replay
    from nanscope.snapshot.step import Snapshot


class _Verb(ModuleType):
    """A room that does what it is called."""

    def __call__(self, snapshot: Snapshot | str | os.PathLike[str], edits: str | Sequence[str] = ()) -> Replay:
        """Do what `nanscope.replay.anywhere.replay` says."""
        from nanscope.replay.anywhere import replay

        return replay(snapshot, edits)


sys.modules[__name__].__class__ = _Verb
