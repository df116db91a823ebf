"""Who made a buffer bad that was finite when the step began: the calls of the step that may have written to it, made once more.

Statistics are written where the tape sleeps, inside a model. What they were before is not kept: the calls begin with finite numbers in
their place, and what comes out bad again was made there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nanscope.capture.alone import alone
from nanscope.capture.follow import Made
from nanscope.capture.modules import ModuleWatch
from nanscope.watching.deeper import reruns_of
from nanscope.watching.look import Look, is_settled, made_look, run_again, told, walked
from nanscope.watching.recording import Recording


@alone()
def buffer_look(recordings: Sequence[Recording], watch: ModuleWatch, budget: int, owner: nn.Module, name: str) -> Look | None:
    """Return where a buffer went bad, None if that does not come out again. owner, name: the part of a model, and its attribute."""
    for recording in reversed(recordings):
        reruns = reruns_of(recording, watch, budget)
        found = run_again(reruns.notes, lambda reruns=reruns: reruns.written(owner, name))  # type: ignore[misc]
        look = None if found is None else made_look(found) if isinstance(found, Made) else walked(*found)
        if look is not None and (look.location is None or is_settled(look.location)):
            return told(look)
    return None
