"""The suffix of a file chooses the renderer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from nanscope.errors import NanscopeError
from nanscope.snapshot.files import write_whole

if TYPE_CHECKING:
    from nanscope.foresight.precision_model import Precision
    from nanscope.reproduce.reproducer import Reproducer
    from nanscope.verdict.incident import Verdict
    from nanscope.verdict.remembered import Memory


PLAIN = (".md", ".png")  # nothing of the precision of a step is in these


def render(verdict: Verdict, path: str | os.PathLike[str], precision: Precision | None = None, memory: Memory | None = None) -> None:
    """Write the report of a verdict; a reader never sees half a file. precision: of its step, where it was measured. memory: of what was
    made of its file before; without one, this user's.

    What is written for an issue has its picture beside it, and the smallest script that fails alike, under the same name.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    path = Path(path)
    drawn = choose(RENDERERS, path)
    if drawn is _md and verdict.incidents:
        picture, script = path.with_suffix(".png"), path.with_suffix(".repro.py")
        write_whole(picture, _png(verdict, None))
        made = _reproducer(verdict, memory)
        if made is not None:
            write_whole(script, made.script.encode())
        write_whole(path, _md(verdict, precision, quote(picture.name), None if made is None else (quote(script.name), made.kept)))
    else:
        write_whole(path, drawn(verdict, precision))


T = TypeVar("T")


def choose(renderers: Mapping[str, T], path: Path) -> T:
    """Return what renders a file of this name.

    Raises NanscopeError if nothing does.
    """
    found = renderers.get(path.suffix.lower())
    if found is None:
        message = f"no renderer for {path.suffix or path.name!r}; known are {', '.join(renderers)}"
        raise NanscopeError(message, slug="unknown-format")
    return found


def suffixes() -> tuple[str, ...]:
    """Return the suffixes that `render` knows."""
    return tuple(RENDERERS)


def _html(verdict: Verdict, precision: Precision | None) -> bytes:
    from nanscope.report.html import render_html

    return render_html(verdict, None, precision).encode()


def _png(verdict: Verdict, precision: Precision | None) -> bytes:
    from io import BytesIO

    from nanscope.report.figure import render_figure

    buffer = BytesIO()
    render_figure(verdict, buffer)
    return buffer.getvalue()


def _txt(verdict: Verdict, precision: Precision | None) -> bytes:
    from nanscope.report.terminal import render_text

    told = render_text(verdict)
    if precision is not None:
        from nanscope.report.precision_text import render_precision_text

        told += f"\n{render_precision_text(precision)}"
    return told.encode(errors="backslashreplace")


def _md(verdict: Verdict, precision: Precision | None, picture: str = "", script: tuple[str, str] | None = None) -> bytes:
    from nanscope.report.markdown import render_markdown

    return render_markdown(verdict, picture, script).encode(errors="backslashreplace")


def _reproducer(verdict: Verdict, memory: Memory | None) -> Reproducer | None:
    """The step of the first cause as a script, None if its file is elsewhere, or there is no such script."""
    from nanscope.reproduce.reproducer import Reproducer, reproducer
    from nanscope.verdict.remembered import Memory

    saved = next((Path(incident.snapshot) for incident in verdict.causes if incident.snapshot), None)
    if saved is None or not saved.is_file():
        return None
    memory = Memory() if memory is None else memory
    try:
        return memory.of(memory.key(Reproducer, saved), lambda: reproducer(saved))
    except NanscopeError:
        return None


def _json(verdict: Verdict, precision: Precision | None) -> bytes:
    from nanscope.plain import show

    told = verdict.to_json() | ({} if precision is None else {"precision": precision.to_json()})
    return (json.dumps(show(_plain(told)), indent=1, allow_nan=False) + "\n").encode()


def _plain(data: Any) -> Any:
    """Settings may hold anything; JSON holds no objects."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data if isinstance(data, (str, int, float, bool, type(None))) else str(data)


RENDERERS: dict[str, Callable[[Verdict, Precision | None], bytes]] = {
    ".html": _html,
    ".md": _md,
    ".png": _png,
    ".txt": _txt,
    ".json": _json,
}
