"""The loss paths: every loss of every framework with its defaults, and under the settings that change how it fails (`Loss.walked`).

paths(["trl.grpo"])     trl.grpo, trl.grpo · beta=0.04, trl.grpo · importance_sampling_level=sequence, …
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.rows import Setting
from nanscope.given import spelled, texts


@dataclass(frozen=True, slots=True)
class LossPath:
    """A loss of a framework under certain settings, in the framework's own words."""

    key: str
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def name(self) -> str:
        """Return `trl.grpo · beta=0.04`."""
        return " · ".join([self.key, *(f"{name}={_show(value)}" for name, value in self.settings)])

    @property
    def supposed(self) -> bool:
        """Return whether the framework has no such setting: nanscope adds a clamp, to show what it would do."""
        return any(name not in LOSSES[self.key].names() for name, _ in self.settings)

    @property
    def framework(self) -> str:
        """Return `trl`."""
        return self.key.split(".")[0]


def _show(value: Setting) -> str:
    return f"{list(value)}" if isinstance(value, (list, tuple)) else str(value)


PATHS = tuple(
    LossPath(loss.key, tuple({**dict(loss.needs), **chosen}.items())) for loss in LOSSES.values() for chosen in ({}, *loss.walked)
)


def paths(prefixes: Iterable[str] | None = None) -> tuple[LossPath, ...]:
    """Return the paths whose name begins with one of the prefixes (`verl`, `trl.grpo`); None or nothing is all of them.

    Raises NanscopeError for a prefix that no path has.
    """
    wanted = () if prefixes is None else tuple(texts("atlas(…)", prefixes, "beginnings of names of loss paths, as trl.grpo"))
    for prefix in wanted:
        if not any(path.name.startswith(prefix) for path in PATHS):
            near = {*(path.framework for path in PATHS), *(path.name for path in PATHS)}
            frameworks = ", ".join(dict.fromkeys(path.framework for path in PATHS))
            message = (
                f"no loss path begins with {prefix!r}{spelled(prefix, near)}: there are {frameworks}, and more after a dot, as in trl.grpo"
            )
            raise NanscopeError(message, slug="unknown-loss")
    return tuple(path for path in PATHS if path.name.startswith(wanted or ""))
