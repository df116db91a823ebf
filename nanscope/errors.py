"""What nanscope raises, and how an error is told. Every one carries a slug, so that a log line can be looked up and a test can name it."""

from __future__ import annotations

import functools
import re
import unicodedata


class NanscopeError(Exception):
    """A request that nanscope cannot serve: the message says what, where, and what to do next.

    slug: a short, stable name of the kind of failure.
    """

    def __init__(self, message: str, *, slug: str) -> None:
        super().__init__(message)
        self.slug = slug


def visible(text: str) -> str:
    """Return text that commands no terminal: control, bidi and other invisible characters, line ends too, are spelled out, as ⟨U+001B⟩."""
    return re.sub(r"[^\x20-\x7e]", lambda match: _spelled(match.group()), text)


def one_line(text: str) -> str:
    """Return text in one line that commands no terminal."""
    return visible(" ".join(text.split()))


@functools.lru_cache(maxsize=4096)
def _spelled(char: str) -> str:
    return f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp") else char


def words_of(error: BaseException) -> str:
    """Return an error in one line: its class, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


LONGEST = 600  # characters of a message that speaks of a file, its path included


class _OfFile(NanscopeError):
    """What is said of a file quotes it: one line of printable characters, and no long one, whatever stands there."""

    def __init__(self, message: str, *, slug: str) -> None:
        shown = visible(message[: 2 * LONGEST])
        super().__init__(shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…", slug=slug)


class SnapshotError(_OfFile):
    """A snapshot file that cannot be read: damaged, not a snapshot, or written by a newer release."""


class Deliberate(NanscopeError):
    """Raised into the training loop because it was asked for; everything else of ours is caught there."""


class ProgramError(_OfFile):
    """A recorded program that cannot be executed: an operator outside the whitelist, a missing value, a wrong shape."""
