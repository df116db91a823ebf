"""The pytest plugin: a test that a loss has no hazard which training can reach.

    def test_my_loss(nanscope):
        nanscope.assert_safe(my_loss)

pytest finds it where nanscope is installed; nothing of nanscope is imported before a test asks for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanscope.foresight.hazard import Check
    from nanscope.foresight.pushes import Severity


class Asserts:
    """What the fixture `nanscope` offers."""

    def check(self, loss: Callable[..., Tensor], inputs: Mapping[str, Any] | None = None, *, dtypes: Sequence[torch.dtype] = ()) -> Check:
        """Return the hazards of a loss, as `nanscope.check` does."""
        from nanscope.watching.checking import check

        return check(loss, inputs, dtypes=dtypes)

    def assert_safe(
        self,
        loss: Callable[..., Tensor],
        inputs: Mapping[str, Any] | None = None,
        *,
        faults: Collection[Severity] | None = None,
        dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        """Fail with the hazards of a loss, if it has any.

        inputs: what it is called with, by name; without them a batch of ours, by the names of its parameters (log_probs, old_log_probs,
        ref_log_probs, rollout_log_probs, advantages, mask, entropy). faults: the severities that count, without them what training can
        reach. dtypes: in which it is checked beside that of the inputs. A search that was cut off is a warning.
        """
        from nanscope.foresight.pushes import Severity
        from nanscope.report.check import render_check

        __tracebackhide__ = True
        counted = (Severity.REACHABLE,) if faults is None else tuple(faults)
        found = self.check(loss, inputs, dtypes=dtypes).only(counted)
        if not found.complete:
            warnings.warn(f"{getattr(loss, '__qualname__', loss)}: {found.sentence}", stacklevel=2)
        if found.hazards:
            pytest.fail(f"{getattr(loss, '__qualname__', loss)} is not safe:\n\n{render_check(found)}", pytrace=False)


@pytest.fixture(scope="session")
def nanscope() -> Asserts:
    """Assertions about losses: `nanscope.assert_safe(my_loss)`."""
    return Asserts()
