"""Why a step went wrong: of the causes whose facts hold, the first one whose counterfactual, run on the recorded step, removes the harm.

cause, tests = because(seen, replayed)
"""

from __future__ import annotations

from nanscope.causes import Cause
from nanscope.replay.tries import Replay
from nanscope.snapshot.observation import Observation, Row
from nanscope.verdict.rules import causes_of


def because(seen: Observation, replayed: Replay) -> tuple[Cause, tuple[Row, ...]]:
    """Return the cause of what was observed, and the tests that were made for it: that of the cause is the last one.

    A cause that cannot be tested (of a clip, of another rank, of a step without a program) is given where its facts hold. Unknown is what
    no cause fits, and what is still there under all that do.
    """
    tests: list[Row] = []
    for cause in causes_of(seen):
        test = replayed.without(cause)
        if test is not None:
            tests.append(test)
        if test is None or test.works:
            return cause, tuple(tests)
    return Cause.UNKNOWN, tuple(tests)
