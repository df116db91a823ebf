"""How a result shows itself: one line in a log, a short one in a REPL, its page in a notebook, and its report as a file.

    >>> scope.verdict
    <Verdict: step 412: backward: coef_1 = torch.exp(log_importance_weights) overflowed at [2, 27] …>
    >>> scope.report("report.html")

Notable: what is shown is made on lower floors than `report`, which draws it, and nobody imports from a floor above. So a class only says
here that it can be shown, and asks the face of the package (`nanscope/__init__`) for its page: that looks the renderer up when somebody
wants to see one, as it looks up its names.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

SHORT = 200  # characters of what a REPL shows


class Shown:
    """A result that people look at. Its class has a `__str__` of one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        line = f"{type(self).__qualname__}: {self}"
        return f"<{line}>" if len(line) <= SHORT - 2 else f"<{line[: SHORT - 3]}…>"

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows: the page in a frame of its own; None, for which a notebook takes the line, where nothing can draw
        it."""
        try:
            page: str = _face().cell(self)
        except ModuleNotFoundError:  # the packages that draw are not in every training image
            return None
        return page

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file; the suffix chooses the form: .html, .txt, .json, and what else this result can be drawn as.

        Raises NanscopeError for a suffix that no renderer has, and if the file cannot be written.
        """
        _face().write(self, path)


def _face() -> Any:
    return import_module(__package__)
