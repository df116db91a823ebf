"""What nanscope raises. Every error carries a slug, so that a log line can be looked up and a test can name it."""

from __future__ import annotations


class NanscopeError(Exception):
    """A request that nanscope cannot serve: the message says what, where, and what to do next.

    slug: a short, stable name of the kind of failure.
    """

    def __init__(self, message: str, *, slug: str) -> None:
        super().__init__(message)
        self.slug = slug


LONGEST = 600  # characters of a message that speaks of a file, its path included


class _OfFile(NanscopeError):
    """What is said of a file quotes it: one line of printable characters, and no long one, whatever stands there."""

    def __init__(self, message: str, *, slug: str) -> None:
        shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message[: 2 * LONGEST])
        super().__init__(shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…", slug=slug)


class SnapshotError(_OfFile):
    """A snapshot file that cannot be read: damaged, not a snapshot, or written by a newer release."""


class Deliberate(NanscopeError):
    """Raised into the training loop because it was asked for; everything else of ours is caught there."""


class ProgramError(_OfFile):
    """A recorded program that cannot be executed: an operator outside the whitelist, a missing value, a wrong shape."""
