"""What nanscope raises. Every error carries a slug, so that a log line can be looked up and a test can name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanscope.diagnose import Verdict


class NanscopeError(Exception):
    """A request that nanscope cannot serve: the message says what, where, and what to do next.

    slug: a short, stable name of the kind of failure.
    """

    def __init__(self, message: str, *, slug: str) -> None:
        super().__init__(message)
        self.slug = slug


class SnapshotError(NanscopeError):
    """A snapshot file that cannot be read: damaged, not a snapshot, or written by a newer release."""


class ProgramError(NanscopeError):
    """A recorded program that cannot be executed: an operator outside the whitelist, a missing value, a wrong shape."""


class NonFiniteError(NanscopeError):
    """Raised into the training loop by `on_nonfinite="stop"`, after the snapshot is on disk.

    verdict: what was found (`Verdict`), snapshot: where the step was saved, None if it could not be written.
    """

    def __init__(self, message: str, *, verdict: Verdict, snapshot: str | None) -> None:
        super().__init__(message, slug="nonfinite-step")
        self.verdict = verdict
        self.snapshot = snapshot
