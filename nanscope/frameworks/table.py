"""All frameworks, one line each, and their functions by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from nanscope.frameworks.rows import Framework, LossSite

# A line is the file beside this one that holds what is known of a framework, as its FRAMEWORK.
FRAMEWORKS: tuple[Framework, ...] = tuple(
    import_module(f"nanscope.frameworks.{name}").FRAMEWORK
    for name in (
        "trl",
        "liger",
        "unsloth",
        "verl",
        "nemo_rl",
        "skyrl",
        "openrlhf",
        "torchtitan",
        "areal",
        "prime_rl",
        "slime",
        "tinker",
    )
)


def recognise(files: Iterable[str]) -> Framework | None:
    """Return the framework whose source files are among `files`, before the one that calls it; None if there is none."""
    paths = [path.replace("\\", "/") for path in files]
    found = [framework for framework in FRAMEWORKS if any(part in path for part in framework.files for path in paths)]
    hosts = {framework.host for framework in found}
    return next((framework for framework in found if framework.name not in hosts), None)


def site_in(file: str, function: str) -> LossSite | None:
    """Return the row of a function, None if no framework computes its loss there. function: qualified name."""
    return next((site for site in _BY_FUNCTION.get(function, ()) if site.is_at(file, function)), None)


def _by_function() -> dict[str, list[LossSite]]:
    found: dict[str, list[LossSite]] = {}
    for framework in FRAMEWORKS:
        for site in framework.sites:
            found.setdefault(site.function, []).append(site)
    return found


_BY_FUNCTION = _by_function()
