"""What nanscope raises. Every error carries a slug, so that a log line can be looked up and a test can name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class NanscopeError(Exception):
    """A request that nanscope cannot serve: the message says what, where, and what to do next.

    slug: a short, stable name of the kind of failure.
    """

    def __init__(self, message: str, *, slug: str) -> None:
        super().__init__(message)
        self.slug = slug


class SnapshotError(NanscopeError):
    """A snapshot file that cannot be read: damaged, not a snapshot, or written by a newer release."""


class Deliberate(NanscopeError):
    """Raised into the training loop because it was asked for; everything else of ours is caught there."""


class ProgramError(NanscopeError):
    """A recorded program that cannot be executed: an operator outside the whitelist, a missing value, a wrong shape."""
