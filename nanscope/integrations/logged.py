"""The logger of a framework, whose every log has the headroom of the loss as well: torchtitan, SkyRL, verl, or one of your own.

processor.logger = nanscope.integrations.Logged(processor.logger, scope)    # torchtitan, in the process that trains
tracker = nanscope.integrations.Logged(tracker)                             # SkyRL, verl: a driver under `nanscope run --ray`

Notable: where workers train and a driver logs, the numbers come from the folder of the run. What several ranks say of a step comes to its
extremes and means.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanscope.errors import words_of
from nanscope.integrations.stretch import Stretch
from nanscope.snapshot.history import Entry
from nanscope.snapshot.runs import histories, latest
from nanscope.snapshot.scalars import Scalars, folded
from nanscope.watching.invitation import Invitation
from nanscope.watching.scope import Scope

log = logging.getLogger("nanscope")

AT_ONCE = 1 << 24  # bytes of a history that are read at a time; the rest is of the next log


class FolderStretch:
    """The lines that the processes of a run have written since the last log. run_dir: of a run, or a folder of runs: the latest is meant.

    Lines that were there before are of somebody else.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._given = Path(run_dir)
        self._scalars: dict[str, Scalars] = {}  # by the name of a process
        self._bad: set[tuple[str, int, int]] = set()  # steps that a rank has called bad: another one says so, too
        self._read = {path: path.stat().st_size for path in self._histories()}

    def scalars(self) -> dict[str, float]:
        """Return their numbers, as `Stretch` does. Raises OSError."""
        return folded([self._numbers(entry) for path in self._histories() for entry in self._new(path)])

    def _histories(self) -> list[Path]:
        return list(histories((latest(self._given) or self._given).resolve()).values())

    def _new(self, path: Path) -> Iterator[Entry]:
        begun = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begun)
            whole, end, _ = file.read(AT_ONCE).rpartition(b"\n")
        self._read[path] = begun + len(whole) + len(end)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):  # no line of ours
                yield Entry.from_json(json.loads(line))

    def _numbers(self, entry: Entry) -> dict[str, float]:
        worker, step = entry.worker or "", (entry.worker or "", entry.step, entry.update or 1)
        another = entry.bad and step not in self._bad
        if another:
            self._bad.add(step)
        return self._scalars.setdefault(worker, Scalars()).of(replace(entry, rank=0, nonfinite=another, ruined=None))


class Logged:
    """A logger with a method `log` that takes a mapping first, or as `data` or `metrics`: what it logs has our numbers, too.

    source: the scope of this process, or where a run writes, on a disk of this machine; without it the run that this process takes part
    in, as under `nanscope run`, and where there is none nothing is added. All else is the logger's.
    """

    def __init__(self, logger: Any, source: Scope | str | os.PathLike[str] | None = None) -> None:
        self._logger, self._source, self._failed = logger, _stretch(source), False

    def log(self, *args: Any, **kwargs: Any) -> Any:
        """Log, as the logger does."""
        ours = self._scalars()
        name = next((name for name in ("data", "metrics") if isinstance(kwargs.get(name), Mapping)), None)
        if name is not None:
            kwargs[name] = {**kwargs[name], **ours}
        elif args and isinstance(args[0], Mapping):
            args = ({**args[0], **ours}, *args[1:])
        return self._logger.log(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def _scalars(self) -> dict[str, float]:
        try:
            return {} if self._source is None else self._source.scalars()
        except Exception as error:  # noqa: BLE001 - training goes on, and its log, whatever fails in here
            if not self._failed:
                self._failed = True
                log.warning("nanscope [history-unread]: %s; the log goes on without numbers of ours", words_of(error))
            return {}


def _stretch(source: Scope | str | os.PathLike[str] | None) -> Stretch | FolderStretch | None:
    if isinstance(source, Scope):
        return Stretch(source)
    invitation = Invitation.of(os.environ) if source is None else None
    run_dir = source if invitation is None else invitation.path
    return None if run_dir is None else FolderStretch(run_dir)
