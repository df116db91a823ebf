"""What nanscope knows of each framework: rows, never imports. A framework is recognised by the files of the recorded calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Remedy:
    """What helps against a cause, in the framework's own words. setting: name=value, None if it has no option for it."""

    causes: tuple[str, ...]
    text: str
    setting: str | None = None


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework. package: its distribution. files: parts of the paths its loss code lives in. settings: option names that matter
    for the loss, as attributes of its config object. version: the release that the rows were checked against. batch: the local variable
    that holds the batch, and its keys of the sampled token ids and of their mask."""

    name: str
    package: str
    version: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    remedies: tuple[Remedy, ...] = field(default_factory=tuple)
    batch: tuple[str, str, str] | None = None


def known() -> tuple[Framework, ...]:
    """Return the table, one row per framework."""
    from nanscope.frameworks import trl

    return (trl.TRL,)


def recognise(files: Iterable[str]) -> Framework | None:
    """Return the framework whose source files are among `files`, None if there is none."""
    paths = [path.replace("\\", "/") for path in files]
    for framework in known():
        if any(part in path for part in framework.files for path in paths):
            return framework
    return None
