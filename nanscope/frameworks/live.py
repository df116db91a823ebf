"""Reads under which options a loss runs, from the objects that stand at its site while it runs.

    seen = glimpse(site, frame.f_locals)       in the running step: references to config objects, never a tensor of more than one element
    objective_of([seen])                       on a hit: {"key": "trl.dapo", "settings": {"beta": 0.0, "epsilon": 0.2, …}, "site": "…"}

What is held costs nothing; it is read, and turned into plain numbers and texts, only when a step is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanscope.frameworks.losses import LOSSES, NOWHERE, live_options, option
from nanscope.frameworks.rows import LossSite, Setting, Settings
from nanscope.frameworks.table import FRAMEWORKS

LONGEST = 60  # characters of a name or value that a file may have us show


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What was seen of a loss function as it ran: its row, and by path what the row asked for."""

    site: LossSite
    held: dict[str, object]

    def configs(self) -> tuple[object, ...]:
        """Return the objects that hold the options."""
        return tuple(self.held[path] for path in self.site.configs if path in self.held)

    def setting(self, name: str) -> object:
        """Return one option: from its own path, else from the config objects; None if it is nowhere."""
        path = dict(self.site.settings).get(name)
        if path is not None and path in self.held:
            return self.held[path]
        return next((held for config in self.configs() if (held := option(config, name)) is not NOWHERE), None)


def glimpse(site: LossSite, variables: Mapping[str, object]) -> Glimpse:
    """Return what a row asks for, by path, from a function's variables. Cheap enough for every step: a few attributes."""
    held: dict[str, object] = {}
    for path in (*site.configs, *(path for _, path in site.settings), *(site.kernel.paths() if site.kernel is not None else ())):
        found = follow(path, variables)
        if found is not NOWHERE and not _is_large(found):
            held[path] = found
    return Glimpse(site, held)


def follow(path: str, variables: Mapping[str, object]) -> object:
    """Return what a path leads to, `self.args.beta` or `inputs.num_items`; a marker if nowhere.

    `path==text` is whether it says so. `given?path` is None where there is nothing at `given`.
    """
    given, _, path = path.rpartition("?")
    if given and follow(given, variables) in (None, NOWHERE):
        return None
    where, _, text = path.partition("==")
    first, *rest = where.split(".")
    found: object = variables.get(first, NOWHERE)
    for name in rest:
        if found is NOWHERE:
            break
        found = option(found, name)
    return str(found) == text if text and found is not NOWHERE else found


def _is_large(value: object) -> bool:
    """Is it a tensor that is more than a number?"""
    count = getattr(value, "numel", None)
    return callable(count) and count() != 1


def plain(value: object) -> object:
    """Return a number out of a tensor of one element; anything else as it is."""
    return value.item() if hasattr(value, "item") and hasattr(value, "numel") else value


def objective_of(glimpses: Sequence[Glimpse]) -> dict[str, Any]:
    """Return the objective that a step ran under, as a snapshot keeps it; {} if no known loss function was seen.

    Of several functions that call each other the first one of the framework's rows counts. Only what was found is in `settings`.
    """
    keyed = [seen for seen in glimpses if seen.site.key is not None]
    if not keyed:
        return {}
    seen = min(keyed, key=_rank)
    before, _, option = (seen.site.key or "").partition("{")
    key = before + str(seen.setting(option.rstrip("}"))) if option else before
    described: dict[str, Any] = {"key": key, "site": f"{seen.site.file}: {seen.site.function}", "settings": {}}
    if key in LOSSES:
        names = LOSSES[key].names()
        found = {name: value for name, value in live_options(key, *seen.configs()).items() if name in names}
        own = {name: plain(seen.held[path]) for name, path in seen.site.settings if path in seen.held and name in names}
        fixed = {name: value for name, value in seen.site.fixed if name in names}
        given = {**found, **{name: value for name, value in own.items() if isinstance(value, Setting)}, **fixed}
        described["settings"] = _as_json(given)
    return described


def _as_json(settings: Settings) -> dict[str, Setting]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _rank(seen: Glimpse) -> int:
    return next(framework.sites.index(seen.site) for framework in FRAMEWORKS if seen.site in framework.sites)


def objective_words(objective: Mapping[str, Any], most: int = 8) -> str:
    """Return an objective in one line: its key, and the settings that are not the framework's defaults. most: settings named."""
    key, settings = str(objective.get("key") or "")[:LONGEST], objective.get("settings")
    if not key or not isinstance(settings, Mapping):
        return key
    defaults = _as_json(LOSSES[key].defaults()) if key in LOSSES else {}
    changed = [
        f"{str(name)[:LONGEST]} {str(value)[:LONGEST]}"
        for name, value in settings.items()
        if name not in defaults or value != defaults[name]
    ]
    more = [f"… {len(changed) - most} more"] if len(changed) > most else []
    return ", ".join((key, *changed[:most], *more)) if changed else f"{key}, its settings at their defaults"
