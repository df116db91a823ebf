"""A process that takes part in a run which another one began: it watches itself, writes into that run's directory, and tells no verdict.

    from nanscope.watching.member import begin
    begin()                                     # a member of the run that NANSCOPE_MEMBER names; nothing at all without it

What goes bad is one line on its log; the process that began the run tells the rest. A process in which nothing trains leaves no file.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

from nanscope.watching.acting import OnNonFinite
from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.execs import leaves
from nanscope.watching.invitation import Invitation
from nanscope.watching.scope import Scope


def begin() -> bool:
    """Begin to watch this process, as its environment says. Returns whether it takes part in a run; a second call changes nothing."""
    invitation = Invitation.of(os.environ)
    if invitation is None or AMBIENCE.invitation is not None:
        return AMBIENCE.invitation is not None
    AMBIENCE.begin(invitation, partial(enter, invitation))
    atexit.register(AMBIENCE.rest)
    leaves()
    return True


def scope_of(invitation: Invitation) -> Scope:
    """Return a scope that takes part in a run."""
    return Scope(
        out=invitation.given,
        on_nonfinite=cast("OnNonFinite", invitation.on_nonfinite),
        save_steps=invitation.save_steps,
        max_bytes=invitation.max_bytes,
        deep_every=invitation.deep_every,
        max_repairs=invitation.max_repairs,
        check=invitation.check,
        invitation=invitation,
    )


def enter(invitation: Invitation) -> Callable[[str], None]:
    """Begin to take part in a run, and return what ends it."""
    scope = scope_of(invitation)
    scope.__enter__()
    return partial(_leave, scope)


def _leave(scope: Scope, raised: str) -> None:
    last = getattr(sys, "last_value", None)  # what ended the interpreter
    scope.leave(raised or ("" if last is None else type(last).__name__))
