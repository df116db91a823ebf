"""All frameworks in one tuple, and their functions by name."""

from __future__ import annotations

from collections.abc import Iterable

from nanscope.frameworks.areal import AREAL
from nanscope.frameworks.liger import LIGER
from nanscope.frameworks.nemo_rl import NEMO_RL
from nanscope.frameworks.openrlhf import OPENRLHF
from nanscope.frameworks.prime_rl import PRIME_RL
from nanscope.frameworks.rows import Framework, LossSite
from nanscope.frameworks.skyrl import SKYRL
from nanscope.frameworks.slime import SLIME
from nanscope.frameworks.torchtitan import TORCHTITAN
from nanscope.frameworks.trl import TRL
from nanscope.frameworks.unsloth import UNSLOTH
from nanscope.frameworks.verl import VERL


def known() -> tuple[Framework, ...]:
    """Return the table, one row per framework."""

    return FRAMEWORKS


def recognise(files: Iterable[str]) -> Framework | None:
    """Return the framework whose source files are among `files`, None if there is none."""
    paths = [path.replace("\\", "/") for path in files]
    for framework in known():
        if any(part in path for part in framework.files for path in paths):
            return framework
    return None


def site_in(file: str, function: str) -> LossSite | None:
    """Return the row of a function, None if no framework computes its loss there. function: qualified name."""

    return next((site for site in BY_FUNCTION.get(function, ()) if site.is_at(file, function)), None)


FRAMEWORKS: tuple[Framework, ...] = (LIGER, UNSLOTH, TRL, VERL, NEMO_RL, SKYRL, OPENRLHF, TORCHTITAN, AREAL, PRIME_RL, SLIME)


def _by_function() -> dict[str, tuple[LossSite, ...]]:
    found: dict[str, tuple[LossSite, ...]] = {}
    for framework in FRAMEWORKS:
        for site in framework.sites:
            found[site.function] = (*found.get(site.function, ()), site)
    return found


BY_FUNCTION = _by_function()
