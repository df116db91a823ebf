"""Where output goes wrong: a stream that cannot hold every character, that nobody reads any more, that is full, or that is not there.

    with legible() as given:         on a stream that is not UTF-8: "step 412 * rank 0", "x tempting, and wrong", never "?" or \\u2717
        app()
        settle()                     what is still in a buffer is written now, while somebody can be told that it was not

A pipe that was closed early (`| head -1`) is no error: the status is that of a program that SIGPIPE ended. A full disk is one line.
A stream that a script closed is opened anew on its descriptor, for what we have to say after it.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell tells it

_HANDLER = "nanscope.legible"

# What stands for a character that an encoding lacks. One character for one where it stands in tables.
SUBSTITUTES = {
    "✓": "+", "✗": "x", "≈": "~", "≠": "!", "⚠": "!", "†": "^", "□": "_",
    "·": "|", "×": "x", "±": "+-", "−": "-", "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-", "↓": "v", "●": "*",
    "≤": "<=", "≥": ">=", "∈": "in", "∞": "inf", "√": "sqrt", "∂": "d", "Σ": "sum", "Δ": "D", "δ": "d", "ℓ": "l", "ρ": "rho", "π": "pi",
    "σ": "sigma", "τ": "tau", "λ": "lambda", "γ": "gamma", "β": "beta", "ε": "eps", "φ": "phi", "ᵀ": "^T", "²": "^2", "½": "1/2",
    "̄": "", "⟨": "<", "⟩": ">", "‘": "'", "’": "'", "“": '"', "”": '"', "␣": "_", "↵": "\\", "⇥": "\\",
    "─": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "▇": "#", "░": ".", "╸": "-", "╺": "-",
}  # fmt: skip


def spelled(text: str, encoding: str) -> str:
    """Return a text in characters that an encoding has."""
    return text.encode(encoding, _HANDLER).decode(encoding)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_spelled(char, error.encoding) for char in error.object[error.start : error.end]), error.end


def _spelled(char: str, encoding: str) -> str:
    """The substitute of one character: from the table, the letter under its accent, or, of any other script, its number."""
    for found in (SUBSTITUTES.get(char), unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode() or None):
        if found is not None:
            with suppress(UnicodeEncodeError):
                found.encode(encoding)
                return found
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


codecs.register_error(_HANDLER, _substitute)


@dataclass(frozen=True, slots=True)
class Given:
    """The streams as the process was given them, each with how it treats what it cannot write; None where it was closed.

    hook: what shows an exception, which typer replaces.
    """

    streams: tuple[TextIO | None, TextIO | None]
    errors: tuple[str, str]
    hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    @contextmanager
    def back(self) -> Iterator[None]:
        """Give them back as they were, within `legible`: to code that is not ours."""
        ours = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self.streams  # None where they were closed: Python does the same
        sys.excepthook = self.hook
        try:
            with _treating(self.streams[0], self.errors[0]), _treating(self.streams[1], self.errors[1]):
                yield
        finally:
            for place, name in enumerate(("stdout", "stderr")):
                now = getattr(sys, name)
                if _is_closed(now):
                    setattr(sys, name, _anew(place + 1))
                elif now is self.streams[place]:  # else it was replaced, and stays so
                    setattr(sys, name, ours[place])


@contextmanager
def legible() -> Iterator[Given]:
    """While it lasts, standard output and error exist, and write what they have no character for in other ones."""
    before = sys.stdout, sys.stderr
    ours = tuple(stream if stream is not None else Nowhere() for stream in before)  # closed, as by `>&-`
    given = Given(before, tuple(getattr(stream, "errors", None) or "strict" for stream in ours), sys.excepthook)  # type: ignore[arg-type]
    sys.stdout, sys.stderr = ours
    with _treating(ours[0], _HANDLER), _treating(ours[1], _HANDLER):
        try:
            yield given
        finally:
            sys.stdout, sys.stderr = before


class Nowhere(io.StringIO):
    """A stream that keeps nothing, and takes no descriptor: one that a script closed could be somebody else's by now."""

    def write(self, text: str, /) -> int:
        """Forget it."""
        return len(text)


def _is_closed(stream: TextIO | None) -> bool:
    """Has a script closed a stream, or its descriptor?"""
    try:
        return stream is not None and os.fstat(stream.fileno()) is None
    except io.UnsupportedOperation:  # it has none
        return False
    except (OSError, ValueError):
        return True
    except AttributeError:  # no file of Python's
        return False


def _anew(number: int) -> TextIO:
    """Open what a script closed: Python closes its streams, and leaves their descriptors open."""
    try:
        return open(number, "w", encoding="utf-8", errors=_HANDLER, closefd=False)  # a descriptor
    except OSError:
        return Nowhere()


@contextmanager
def _treating(stream: TextIO | None, errors: str) -> Iterator[None]:
    """A stream with another error handler, and its own again afterwards. What is no file of Python's own stays as it is."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    with suppress(OSError, ValueError):  # it flushes; whoever writes next is told
        stream.reconfigure(errors=errors)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            stream.reconfigure(errors=before)


def settle() -> None:
    """Write what the streams still hold. Raises OSError if one cannot be written, BrokenPipeError if nobody reads it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def unwrapped() -> bool:
    """Take off what click puts around streams that it could not write to. Returns whether it did."""
    found = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream).__name__ == "PacifyFlushWrapper":
            setattr(sys, name, stream.wrapped)
            found = True
    return found


def silence() -> None:
    """Throw away what a stream could not write, so that the interpreter does not try again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
