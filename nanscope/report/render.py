"""The suffix of a file chooses the renderer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanscope.errors import NanscopeError
from nanscope.snapshot.files import write_whole

if TYPE_CHECKING:
    from nanscope.verdict.incident import Verdict


def render(verdict: Verdict, path: str | os.PathLike[str]) -> None:
    """Write the report of a verdict; a reader never sees half a file.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    path = Path(path)
    write_whole(path, choose(RENDERERS, path)(verdict))


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


def _html(verdict: Verdict) -> bytes:
    from nanscope.report.html import render_html

    return render_html(verdict).encode()


def _png(verdict: Verdict) -> bytes:
    from io import BytesIO

    from nanscope.report.figure import render_figure

    buffer = BytesIO()
    render_figure(verdict, buffer)
    return buffer.getvalue()


def _txt(verdict: Verdict) -> bytes:
    from nanscope.report.terminal import render_text

    return render_text(verdict).encode(errors="backslashreplace")


def _json(verdict: Verdict) -> bytes:
    from nanscope.plain import show

    return (json.dumps(show(_plain(verdict.to_json())), indent=1, allow_nan=False) + "\n").encode()


def _plain(data: Any) -> Any:
    """Settings may hold anything; JSON holds no objects."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data if isinstance(data, (str, int, float, bool, type(None))) else str(data)


RENDERERS: dict[str, Callable[[Verdict], bytes]] = {".html": _html, ".png": _png, ".txt": _txt, ".json": _json}
